// Random numbers from Philox4x32-10: element i comes from the counter offset + i / 4, the same words on every device.
//
// Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011. What follows the words is
// computed in float64 without fused operations, as the host does.
#include "common.cuh"

struct Words {
    uint32 at[4];
};

__device__ __forceinline__ Words philox(uint64 counter, uint64 seed) {
    Words words = {{static_cast<uint32>(counter), static_cast<uint32>(counter >> 32), 0, 0}};
    uint32 key[2] = {static_cast<uint32>(seed), static_cast<uint32>(seed >> 32)};
#pragma unroll
    for (int round = 0; round < 10; round++) {
        const uint64 first = static_cast<uint64>(words.at[0]) * 0xD2511F53u;
        const uint64 second = static_cast<uint64>(words.at[2]) * 0xCD9E8D57u;
        words = Words{{static_cast<uint32>(second >> 32) ^ words.at[1] ^ key[0], static_cast<uint32>(second),
                       static_cast<uint32>(first >> 32) ^ words.at[3] ^ key[1], static_cast<uint32>(first)}};
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    return words;
}

// A number in [0, 1), a multiple of 2^-24.
__device__ __forceinline__ double unit(uint32 word) { return (word >> 8) * 0x1p-24; }

__device__ __forceinline__ double scaled(double low, double by, double value) {
    return __dadd_rn(low, __dmul_rn(by, value));
}

template <class Transform>
__device__ __forceinline__ void draw(TYPE* out, uint64 seed, uint64 offset, int64 count, const Geometry<1>& geometry,
                                     Transform transform) {
    const int64 step = static_cast<int64>(gridDim.x) * THREADS, groups = (count + 3) / 4;
    for (int64 group = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x; group < groups; group += step) {
        double values[4];
        transform(philox(offset + group, seed), values);
        for (int k = 0; k < 4 && 4 * group + k < count; k++) {
            int64 at[1];
            geometry.locate(4 * group + k, at);
            out[at[0]] = put<TYPE>(static_cast<Real<TYPE>>(values[k]));
        }
    }
}

KERNEL random_uniform(TYPE* out, uint64 seed, uint64 offset, double low, double high, int64 count,
                      const __grid_constant__ Geometry<1> geometry) {
    grid_dependency_synchronize();
    draw(out, seed, offset, count, geometry, [=](const Words& words, double (&values)[4]) {
        for (int k = 0; k < 4; k++) values[k] = scaled(low, high - low, unit(words.at[k]));
    });
}

// By Box and Muller; 1 - u lies in (0, 1], where the logarithm is finite.
KERNEL random_normal(TYPE* out, uint64 seed, uint64 offset, double mean, double deviation, int64 count,
                     const __grid_constant__ Geometry<1> geometry) {
    grid_dependency_synchronize();
    draw(out, seed, offset, count, geometry, [=](const Words& words, double (&values)[4]) {
        for (int k = 0; k < 4; k += 2) {
            const double radius = sqrt(-2.0 * log(1.0 - unit(words.at[k])));
            const double angle = 2.0 * 3.14159265358979323846 * unit(words.at[k + 1]);
            values[k] = scaled(mean, deviation, __dmul_rn(radius, cos(angle)));
            values[k + 1] = scaled(mean, deviation, __dmul_rn(radius, sin(angle)));
        }
    });
}
