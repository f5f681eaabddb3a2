// Softmax cross-entropy of rows of logits, of type TYPE, and its gradient; targets are int64 or, where not `wide`, int32.
#include "common.cuh"

using Value = Real<TYPE>;

__device__ __forceinline__ float exponential(float a) { return expf(a); }
__device__ __forceinline__ double exponential(double a) { return exp(a); }
__device__ __forceinline__ float logarithm(float a) { return logf(a); }
__device__ __forceinline__ double logarithm(double a) { return log(a); }

__device__ __forceinline__ int64 target_of(const void* targets, int64 place, int64 wide) {
    return wide ? static_cast<const int64*>(targets)[place] : static_cast<const int*>(targets)[place];
}

// The largest over the block; NaN where one is NaN.
__device__ __forceinline__ Value block_max(Value value) {
    __shared__ Value parts[WARPS];
    const auto larger = [](Value a, Value b) { return a > b || is_nan(a) ? a : b; };
#pragma unroll
    for (int step = 16; step > 0; step >>= 1) value = larger(value, __shfl_xor_sync(ALL_LANES, value, step));
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
    __syncthreads();
    value = parts[0];
#pragma unroll
    for (int warp = 1; warp < WARPS; warp++) value = larger(value, parts[warp]);
    __syncthreads();
    return value;
}

// One block for each row; the last one adds up the rows' losses. A target that is no class makes the loss and the
// row's probabilities NaN, and leaves in `bad_target` the target, plus 1 if it is not negative.
KERNEL cross_entropy(TYPE* loss, TYPE* probabilities, const TYPE* logits, const void* targets, double* losses,
                     uint32* counter, int64* bad_target, int64 rows, int64 classes, int64 row_stride, int64 class_stride,
                     int64 out_row_stride, int64 out_class_stride, int64 target_stride, int64 wide) {
    grid_dependency_synchronize();
    const int64 row = blockIdx.x;
    logits += row * row_stride;
    probabilities += row * out_row_stride;
    const int64 target = target_of(targets, row * target_stride, wide);
    const bool valid = target >= 0 && target < classes;
    const Value infinity = static_cast<Value>(__int_as_float(0x7f800000)), nan = infinity - infinity;

    Value largest = -infinity;
    for (int64 c = threadIdx.x; c < classes; c += THREADS) {
        const Value score = get(logits[c * class_stride]);
        largest = score > largest || is_nan(score) ? score : largest;
    }
    largest = block_max(largest);
    Value total = 0;
    for (int64 c = threadIdx.x; c < classes; c += THREADS) total += exponential(get(logits[c * class_stride]) - largest);
    total = block_sum(total);
    for (int64 c = threadIdx.x; c < classes; c += THREADS) {
        const Value share = exponential(get(logits[c * class_stride]) - largest) / total;
        probabilities[c * out_class_stride] = put<TYPE>(valid ? share : nan);
    }
    if (threadIdx.x == 0) {
        const Value picked = valid ? get(logits[target * class_stride]) - largest : nan;
        if (!valid) *bad_target = target >= 0 ? target + 1 : target;
        __stcg(&losses[row], static_cast<double>(logarithm(total)) - static_cast<double>(picked));
    }
    if (!is_last_block(counter, gridDim.x)) return;
    double sum = 0;
    for (int64 i = threadIdx.x; i < rows; i += THREADS) sum += __ldcg(&losses[i]);
    sum = block_sum(sum);
    if (threadIdx.x == 0) *loss = put<TYPE>(static_cast<Value>(sum / static_cast<double>(rows)));
}

KERNEL cross_entropy_backward(TYPE* grad_logits, const TYPE* grad_loss, const TYPE* probabilities, const void* targets,
                              int64 rows, int64 classes, int64 row_stride, int64 class_stride, int64 out_row_stride,
                              int64 out_class_stride, int64 target_stride, int64 wide) {
    grid_dependency_synchronize();
    const Value scale = get(*grad_loss) / static_cast<Value>(rows);
    const int64 count = rows * classes, step = static_cast<int64>(gridDim.x) * THREADS;
    for (int64 i = static_cast<int64>(blockIdx.x) * THREADS + threadIdx.x; i < count; i += step) {
        int64 row = i;
        const int64 c = split(row, classes);
        const Value hit = target_of(targets, row * target_stride, wide) == c ? Value(1) : Value(0);
        const Value share = get(probabilities[row * row_stride + c * class_stride]);
        grad_logits[row * out_row_stride + c * out_class_stride] = put<TYPE>((share - hit) * scale);
    }
}
