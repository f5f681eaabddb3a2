// The elementwise kernel OPERATION for the element type TYPE, dense, strided, and strided into a dense
// result; an operand without an address is a scalar.
#include "common.cuh"

constexpr int WIDTH = 16 / sizeof(TYPE);
constexpr int UNROLL = WIDTH > 8 ? 1 : 4;
using Value = Real<TYPE>;

__device__ __forceinline__ float exponential(float a) { return expf(a); }
__device__ __forceinline__ double exponential(double a) { return exp(a); }
__device__ __forceinline__ float logarithm(float a) { return logf(a); }
__device__ __forceinline__ double logarithm(double a) { return log(a); }
__device__ __forceinline__ float root(float a) { return sqrtf(a); }
__device__ __forceinline__ double root(double a) { return sqrt(a); }

#define DECLARE(NAME, RESULT, EXPRESSION)                                      \
    struct NAME {                                                                \
        typedef RESULT Result;                                                   \
        static __device__ __forceinline__ Real<RESULT> apply(Value a, Value b) { \
            return static_cast<Real<RESULT>>(EXPRESSION);                        \
        }                                                                        \
    };

DECLARE(Add, TYPE, a + b)
DECLARE(Subtract, TYPE, a - b)
DECLARE(Multiply, TYPE, a* b)
DECLARE(Equal, bool, a == b)
DECLARE(Negative, TYPE, -a)
DECLARE(Relu, TYPE, a > Value(0) || is_nan(a) ? a : Value(0))
DECLARE(ReluBackward, TYPE, is_open(b) ? a : Value(0))
DECLARE(Fill, TYPE, a)
#if FLOATING
DECLARE(Divide, TYPE, a / b)
DECLARE(Exp, TYPE, exponential(a))
DECLARE(Log, TYPE, logarithm(a))
DECLARE(Sqrt, TYPE, root(a))
typedef double Scalar;
#else
// Quotients and roots of integers are those of the same floating-point numbers, cut off.
DECLARE(Divide, TYPE, static_cast<double>(a) / static_cast<double>(b))
DECLARE(Exp, TYPE, exp(static_cast<double>(a)))
DECLARE(Log, TYPE, log(static_cast<double>(a)))
DECLARE(Sqrt, TYPE, sqrt(static_cast<double>(a)))
typedef int64 Scalar;
#endif

typedef OPERATION::Result Result;

__device__ __forceinline__ Result compute(Value a, Value b) { return put<Result>(OPERATION::apply(a, b)); }

KERNEL dense(Result* out, const TYPE* a, const TYPE* b, Scalar a_scalar, Scalar b_scalar, int64 count) {
    grid_dependency_synchronize();
    const Value a_value = static_cast<Value>(a_scalar), b_value = static_cast<Value>(b_scalar);
    const int64 first = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x;
    const int64 step = static_cast<int64>(gridDim.x) * THREADS;
    // Views may start anywhere: without alignment every element is one of the tail.
    const bool aligned = ((reinterpret_cast<uint64>(out) % sizeof(Pack<Result, WIDTH>)) |
                          (reinterpret_cast<uint64>(a) % 16) | (reinterpret_cast<uint64>(b) % 16)) == 0;
    const int64 packs = aligned ? count / WIDTH : 0;
    for (int64 pack = first; pack < packs; pack += UNROLL * step) {
        Pack<TYPE, WIDTH> left[UNROLL], right[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            if (pack + k * step < packs) {
                if (a) left[k] = load_pack<TYPE, WIDTH>(a, pack + k * step);
                if (b) right[k] = load_pack<TYPE, WIDTH>(b, pack + k * step);
            }
        }
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            if (pack + k * step < packs) {
                Pack<Result, WIDTH> result;
#pragma unroll
                for (int i = 0; i < WIDTH; i++)
                    result.at[i] = compute(a ? get(left[k].at[i]) : a_value, b ? get(right[k].at[i]) : b_value);
                store_pack<Result, WIDTH>(out, pack + k * step, result);
            }
        }
    }
    for (int64 i = packs * WIDTH + first; i < count; i += step)
        out[i] = compute(a ? get(a[i]) : a_value, b ? get(b[i]) : b_value);
}

KERNEL strided(Result* out, const TYPE* a, const TYPE* b, Scalar a_scalar, Scalar b_scalar, int64 count,
               const __grid_constant__ Geometry<3> geometry) {
    grid_dependency_synchronize();
    const Value a_value = static_cast<Value>(a_scalar), b_value = static_cast<Value>(b_scalar);
    const int64 step = static_cast<int64>(gridDim.x) * THREADS;
    for (int64 i = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x; i < count; i += step) {
        int64 at[3];
        geometry.locate(i, at);
        out[at[0]] = compute(a ? get(a[at[1]]) : a_value, b ? get(b[at[2]]) : b_value);
    }
}

// The result is dense in the order of the walk, so that whole packs of it are written.
KERNEL gathered(Result* out, const TYPE* a, const TYPE* b, Scalar a_scalar, Scalar b_scalar, int64 count,
                const __grid_constant__ Geometry<2> geometry) {
    grid_dependency_synchronize();
    const Value a_value = static_cast<Value>(a_scalar), b_value = static_cast<Value>(b_scalar);
    const int64 step = static_cast<int64>(gridDim.x) * THREADS, packs = (count + WIDTH - 1) / WIDTH;
    const bool aligned = reinterpret_cast<uint64>(out) % sizeof(Pack<Result, WIDTH>) == 0;
    for (int64 pack = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x; pack < packs; pack += step) {
        int64 at[2][WIDTH];
        geometry.locate_pack<WIDTH>(pack * WIDTH, at);
        const int here = static_cast<int>(min(count - pack * WIDTH, static_cast<int64>(WIDTH)));
        Pack<TYPE, WIDTH> left, right;
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            if (a && i < here) left.at[i] = a[at[0][i]];
            if (b && i < here) right.at[i] = b[at[1][i]];
        }
        Pack<Result, WIDTH> result;
#pragma unroll
        for (int i = 0; i < WIDTH; i++)
            result.at[i] = compute(a ? get(left.at[i]) : a_value, b ? get(right.at[i]) : b_value);
        if (aligned && here == WIDTH) {
            store_pack<Result, WIDTH>(out, pack, result);
        } else {
#pragma unroll
            for (int i = 0; i < WIDTH; i++)
                if (i < here) out[pack * WIDTH + i] = result.at[i];
        }
    }
}
