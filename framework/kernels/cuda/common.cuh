// What all kernels share: element types and their arithmetic, packs of elements, strided arrays, sums over a block.
#pragma once

typedef long long int64;
typedef unsigned char uint8;
typedef unsigned int uint32;
typedef unsigned long long uint64;

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr uint32 ALL_LANES = 0xffffffffu;

// What every kernel does first: it may be launched while the one in front of it in its stream still runs, and waits here
// until all that wrote is seen. Launching it early is worth more than 1 us; on older devices it is not.
__device__ __forceinline__ void grid_dependency_synchronize() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- element types: what lies in memory, and what is computed with

struct bfloat16 {
    unsigned short bits;
};

template <class T>
struct Arithmetic {
    typedef T Type;
};
template <>
struct Arithmetic<bfloat16> {
    typedef float Type;
};
template <class T>
using Real = typename Arithmetic<T>::Type;

template <class T>
__device__ __forceinline__ Real<T> get(T stored) {
    return stored;
}
template <>
__device__ __forceinline__ float get<bfloat16>(bfloat16 stored) {
    return __uint_as_float(static_cast<uint32>(stored.bits) << 16);
}

template <class T>
__device__ __forceinline__ T put(Real<T> value) {
    return value;
}
template <>
__device__ __forceinline__ bfloat16 put<bfloat16>(float value) {
    bfloat16 stored;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(stored.bits) : "f"(value));
#else
    // Rounds to nearest, ties to even; a NaN keeps its sign and stays a NaN.
    const uint32 bits = __float_as_uint(value);
    const uint32 rounded = value != value ? bits | 0x400000u : bits + 0x7fffu + ((bits >> 16) & 1u);
    stored.bits = static_cast<unsigned short>(rounded >> 16);
#endif
    return stored;
}

template <class T>
__device__ __forceinline__ bool is_nan(T value) {
    return value != value;
}

// Whether a ReLU lets the gradient through, from its input or its result: also what is no number, so that it is seen.
template <class T>
__device__ __forceinline__ bool is_open(T value) {
    return !(value <= T(0));
}

__device__ __forceinline__ float inverse_root(float value) { return 1.0f / sqrtf(value); }
__device__ __forceinline__ double inverse_root(double value) { return 1.0 / sqrt(value); }
__device__ __forceinline__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double multiply_add(double a, double b, double c) { return fma(a, b, c); }

// ---- packs: elements that one thread moves at once

template <class T, int SIZE>
struct alignas(sizeof(T) * SIZE) Pack {
    T at[SIZE];
};

template <class T, int SIZE>
__device__ __forceinline__ Pack<T, SIZE> load_pack(const T* base, int64 pack) {
    return reinterpret_cast<const Pack<T, SIZE>*>(base)[pack];
}

template <class T, int SIZE>
__device__ __forceinline__ void store_pack(T* base, int64 pack, const Pack<T, SIZE>& values) {
    reinterpret_cast<Pack<T, SIZE>*>(base)[pack] = values;
}

// ---- strided arrays of up to MOST_DIMS dimensions, the last one running fastest

constexpr int MOST_DIMS = 8;

// Splits index by extent. Most indices fit 32 bits, where a division costs a fraction of one of 64 bits.
__device__ __forceinline__ int64 split(int64& index, int64 extent) {
    int64 rest;
    if (((index | extent) >> 32) == 0) {
        const uint32 quotient = static_cast<uint32>(index) / static_cast<uint32>(extent);
        rest = static_cast<uint32>(index) - quotient * static_cast<uint32>(extent);
        index = quotient;
    } else {
        const int64 quotient = index / extent;
        rest = index - quotient * extent;
        index = quotient;
    }
    return rest;
}

template <int ARRAYS>
struct Geometry {
    int64 dims;
    int64 extent[MOST_DIMS];
    int64 stride[ARRAYS][MOST_DIMS];

    // Where element number `index` lies in each array. Returns how many elements the last dimension has from there on.
    __device__ __forceinline__ int64 locate(int64 index, int64 (&offset)[ARRAYS]) const {
        int64 left = 1;
#pragma unroll
        for (int array = 0; array < ARRAYS; array++) offset[array] = 0;
#pragma unroll 1
        for (int dim = static_cast<int>(dims) - 1; dim >= 0; dim--) {
            const int64 place = split(index, extent[dim]);
            if (dim == dims - 1) left = extent[dim] - place;
#pragma unroll
            for (int array = 0; array < ARRAYS; array++) offset[array] += place * stride[array][dim];
        }
        return left;
    }

    // Where SIZE elements from `index` on lie in each array.
    template <int SIZE>
    __device__ __forceinline__ void locate_pack(int64 index, int64 (&offset)[ARRAYS][SIZE]) const {
        int64 at[ARRAYS];
        int64 left = locate(index, at);
#pragma unroll
        for (int i = 0; i < SIZE; i++) {
#pragma unroll
            for (int array = 0; array < ARRAYS; array++) offset[array][i] = at[array];
            if (--left > 0) {
#pragma unroll
                for (int array = 0; array < ARRAYS; array++) at[array] += stride[array][dims - 1];
            } else if (i + 1 < SIZE) {
                left = locate(index + i + 1, at);
            }
        }
    }
};

// ---- the last block to come here, of those that share a counter, goes on with what all have written

// The counter starts at 0 and is left at 0 for the next launch in the same stream.
__device__ __forceinline__ bool is_last_block(uint32* counter, uint32 blocks) {
    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(counter, 1u) == blocks - 1;
        if (last) *counter = 0;
    }
    __syncthreads();
    __threadfence();
    return last;
}

// The sum over the block, the same in each thread, always added in the same order.
template <class T>
__device__ __forceinline__ T block_sum(T value) {
    __shared__ T parts[WARPS];
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) value += __shfl_xor_sync(ALL_LANES, value, step);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    value = parts[0];
#pragma unroll
    for (int warp = 1; warp < WARPS; warp++) value += parts[warp];
    __syncthreads();
    return value;
}
