// The reduction OPERATION of INPUT elements over some dimensions to OUTPUT elements. A block covers X outputs by
// THREADS / X reduced elements; a long reduction is split over blocks, whose parts a second kernel joins.
#include "common.cuh"

using Value = Real<INPUT>;

struct Shape {
    Geometry<2> kept;  // of the output and of the input
    Geometry<1> reduced;
};

#if FLOATING
// Adding in float64 costs nothing where memory is the limit, and makes the order of adding hardly matter.
typedef double SumAccumulator;
#else
typedef int64 SumAccumulator;
#endif

template <class T>
struct Total {
    typedef T Part;
    static __device__ __forceinline__ Part start() { return T(0); }
    static __device__ __forceinline__ Part take(Value value, int64) { return static_cast<T>(value); }
    static __device__ __forceinline__ Part join(Part a, Part b) { return a + b; }
};

struct Sum : Total<SumAccumulator> {
    static __device__ __forceinline__ OUTPUT finish(Part total, int64) {
        return put<OUTPUT>(static_cast<Real<OUTPUT>>(total));
    }
};

struct Mean : Total<double> {
    static __device__ __forceinline__ OUTPUT finish(Part total, int64 count) {
        return put<OUTPUT>(static_cast<Real<OUTPUT>>(total / static_cast<double>(count)));
    }
};

// The largest with its place; NaN is larger than all, and of equals the first wins.
struct Largest {
    struct Part {
        Value value;
        int64 place;
    };
    static __device__ __forceinline__ Part start() { return Part{Value(0), -1}; }
    static __device__ __forceinline__ Part take(Value value, int64 place) { return Part{value, place}; }
    static __device__ __forceinline__ Part join(Part a, Part b) {
        if (a.place < 0) return b;
        if (b.place < 0) return a;
        const bool a_nan = is_nan(a.value), b_nan = is_nan(b.value);
        if (a_nan || b_nan) return a_nan && (!b_nan || a.place < b.place) ? a : b;
        return a.value > b.value || (a.value == b.value && a.place < b.place) ? a : b;
    }
};

struct Max : Largest {
    static __device__ __forceinline__ OUTPUT finish(Part best, int64) {
        return put<OUTPUT>(static_cast<Real<OUTPUT>>(best.value));
    }
};

struct ArgMax : Largest {
    static __device__ __forceinline__ OUTPUT finish(Part best, int64) {
        return put<OUTPUT>(static_cast<Real<OUTPUT>>(best.place));
    }
};

// Not inlined: it is needed at many places, and seldom where it matters.
template <int ARRAYS>
__device__ __noinline__ int64 locate_by_division(const Geometry<ARRAYS>& geometry, int64 index, int array) {
    int64 at[ARRAYS];
    geometry.locate(index, at);
    return at[array];
}

template <int ARRAYS>
__device__ __forceinline__ int64 locate(const Geometry<ARRAYS>& geometry, int64 index, int array) {
    return geometry.dims == 1 ? index * geometry.stride[array][0] : locate_by_division(geometry, index, array);
}

typedef OPERATION::Part Part;

// The parts of the block's threads joined over the rows of its tile; the threads of row 0 get the result.
template <int X>
__device__ __forceinline__ Part join_rows(Part part) {
    __shared__ alignas(16) char memory[THREADS * sizeof(Part)];
    Part* parts = reinterpret_cast<Part*>(memory);
    const int row = threadIdx.x / X;
    parts[threadIdx.x] = part;
    for (int rows = THREADS / X / 2; rows > 0; rows /= 2) {
        __syncthreads();
        if (row < rows) parts[threadIdx.x] = OPERATION::join(parts[threadIdx.x], parts[threadIdx.x + rows * X]);
    }
    return parts[threadIdx.x];
}

template <int X>
__device__ __forceinline__ void reduce(OUTPUT* out, const INPUT* in, Part* parts, int64 outputs, int64 count,
                                       int64 per_split, const Shape& shape) {
    constexpr int ROWS = THREADS / X, UNROLL = 8;
    const int64 output = static_cast<int64>(blockIdx.x) * X + threadIdx.x % X;
    const int64 start = blockIdx.y * per_split;
    const int64 stop = start + per_split < count ? start + per_split : count;
    Part part = OPERATION::start();
    if (output < outputs) {
        in += locate(shape.kept, output, 1);
        for (int64 i = start + threadIdx.x / X; i < stop; i += UNROLL * ROWS) {
            INPUT taken[UNROLL];
#pragma unroll
            for (int k = 0; k < UNROLL; k++)
                if (i + k * ROWS < stop)
                    taken[k] = in[locate(shape.reduced, i + k * ROWS, 0)];
#pragma unroll
            for (int k = 0; k < UNROLL; k++)
                if (i + k * ROWS < stop) part = OPERATION::join(part, OPERATION::take(get(taken[k]), i + k * ROWS));
        }
    }
    if (ROWS > 1) part = join_rows<X>(part);
    if (threadIdx.x < X && output < outputs) {
        if (gridDim.y == 1)
            out[locate(shape.kept, output, 0)] =
                OPERATION::finish(part, count);
        else
            parts[blockIdx.y * outputs + output] = part;
    }
}

KERNEL reduce_rows(OUTPUT* out, const INPUT* in, Part* parts, int64 outputs, int64 count, int64 per_split,
                   const __grid_constant__ Shape shape) {
    grid_dependency_synchronize();
    reduce<1>(out, in, parts, outputs, count, per_split, shape);
}

KERNEL reduce_columns(OUTPUT* out, const INPUT* in, Part* parts, int64 outputs, int64 count, int64 per_split,
                      const __grid_constant__ Shape shape) {
    grid_dependency_synchronize();
    reduce<32>(out, in, parts, outputs, count, per_split, shape);
}

// One thread for each output, where there are many and each takes little.
KERNEL reduce_lanes(OUTPUT* out, const INPUT* in, Part* parts, int64 outputs, int64 count, int64 per_split,
                    const __grid_constant__ Shape shape) {
    grid_dependency_synchronize();
    reduce<THREADS>(out, in, parts, outputs, count, per_split, shape);
}

KERNEL join_splits(OUTPUT* out, const INPUT*, const Part* parts, int64 outputs, int64 count, int64 splits,
                   const __grid_constant__ Shape shape) {
    grid_dependency_synchronize();
    constexpr int X = 32;
    const int64 output = static_cast<int64>(blockIdx.x) * X + threadIdx.x % X;
    Part part = OPERATION::start();
    if (output < outputs)
        for (int64 i = threadIdx.x / X; i < splits; i += THREADS / X)
            part = OPERATION::join(part, parts[i * outputs + output]);
    part = join_rows<X>(part);
    if (threadIdx.x < X && output < outputs)
        out[locate(shape.kept, output, 0)] = OPERATION::finish(part, count);
}
