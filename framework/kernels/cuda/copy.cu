// Copies from elements of type INPUT to elements of type OUTPUT: dense, strided, and strided into dense ones.
#include "common.cuh"

constexpr int WIDTH = 16 / (sizeof(INPUT) > sizeof(OUTPUT) ? sizeof(INPUT) : sizeof(OUTPUT));
constexpr int UNROLL = WIDTH > 8 ? 1 : 4;

__device__ __forceinline__ OUTPUT convert(INPUT value) {
    return put<OUTPUT>(static_cast<Real<OUTPUT>>(get(value)));
}

KERNEL dense(OUTPUT* out, const INPUT* in, int64 count) {
    grid_dependency_synchronize();
    const int64 first = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x;
    const int64 step = static_cast<int64>(gridDim.x) * THREADS;
    const bool aligned = ((reinterpret_cast<uint64>(out) | reinterpret_cast<uint64>(in)) % 16) == 0;
    const int64 packs = aligned ? count / WIDTH : 0;
    for (int64 pack = first; pack < packs; pack += UNROLL * step) {
        Pack<INPUT, WIDTH> taken[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; k++)
            if (pack + k * step < packs) taken[k] = load_pack<INPUT, WIDTH>(in, pack + k * step);
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            if (pack + k * step < packs) {
                Pack<OUTPUT, WIDTH> result;
#pragma unroll
                for (int i = 0; i < WIDTH; i++) result.at[i] = convert(taken[k].at[i]);
                store_pack<OUTPUT, WIDTH>(out, pack + k * step, result);
            }
        }
    }
    for (int64 i = packs * WIDTH + first; i < count; i += step) out[i] = convert(in[i]);
}

KERNEL strided(OUTPUT* out, const INPUT* in, int64 count, const __grid_constant__ Geometry<2> geometry) {
    grid_dependency_synchronize();
    const int64 step = static_cast<int64>(gridDim.x) * THREADS;
    for (int64 i = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x; i < count; i += step) {
        int64 at[2];
        geometry.locate(i, at);
        out[at[0]] = convert(in[at[1]]);
    }
}

// The result is dense in the order of the walk, so that whole packs of it are written.
KERNEL gathered(OUTPUT* out, const INPUT* in, int64 count, const __grid_constant__ Geometry<1> geometry) {
    grid_dependency_synchronize();
    const int64 step = static_cast<int64>(gridDim.x) * THREADS, packs = (count + WIDTH - 1) / WIDTH;
    const bool aligned = reinterpret_cast<uint64>(out) % sizeof(Pack<OUTPUT, WIDTH>) == 0;
    for (int64 pack = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x; pack < packs; pack += step) {
        int64 at[1][WIDTH];
        geometry.locate_pack<WIDTH>(pack * WIDTH, at);
        const int here = static_cast<int>(min(count - pack * WIDTH, static_cast<int64>(WIDTH)));
        Pack<OUTPUT, WIDTH> result;
#pragma unroll
        for (int i = 0; i < WIDTH; i++)
            if (i < here) result.at[i] = convert(in[at[0][i]]);
        if (aligned && here == WIDTH) {
            store_pack<OUTPUT, WIDTH>(out, pack, result);
        } else {
#pragma unroll
            for (int i = 0; i < WIDTH; i++)
                if (i < here) out[pack * WIDTH + i] = result.at[i];
        }
    }
}
