// Batch normalisation of small images in one launch each way: a cluster of CLUSTER blocks holds TILE channels of all
// rows in registers, and its blocks read each other's sums from shared memory. Types as in normalization.cu; WIDTH
// elements are moved at once, and `channels` is a multiple of TILE.
#include "common.cuh"

using Value = Real<STORAGE>;
typedef Pack<STORAGE, WIDTH> Elements;

#include "normalization.cuh"
#include "normalization_cluster.cuh"

template <bool RELU, bool RESIDUAL, bool BITS>
__device__ __forceinline__ void normalise(
    STORAGE* y, uint8* bits, PARAMETER* running_mean, PARAMETER* running_var, STATISTIC* mean, STATISTIC* inv_std,
    Value* coefficients, const STORAGE* x, const STORAGE* residual, const PARAMETER* weight, const PARAMETER* bias,
    double eps, double momentum, int rows, int channels, int rows_per_block) {
    __shared__ double totals[2][TILE];
    __shared__ alignas(16) Value shared[3 * TILE];
    const Hold hold(rows, channels, rows_per_block);
    Elements taken[HELD], added[HELD];
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        if (hold.has(k)) {
            taken[k] = load_pack<STORAGE, WIDTH>(x, hold.at(k));
            if (RESIDUAL) added[k] = load_pack<STORAGE, WIDTH>(residual, hold.at(k));
        }
    }
    double sums[2][WIDTH] = {};
    if (hold.has(0)) {
        ShiftedSums own(taken[0]);
#pragma unroll
        for (int k = 0; k < HELD; k++)
            if (hold.has(k)) own.add(taken[k]);
        own.about(load_pack<STORAGE, WIDTH>(x, hold.pack), sums);
    }
    cluster_sums(sums, totals);
    if (threadIdx.x < TILE) {
        const int channel = blockIdx.y * TILE + threadIdx.x;
        const Moments moments(get(x[channel]), totals[0][threadIdx.x], totals[1][threadIdx.x], rows, eps);
        const Channel made = moments.channel(weight, bias, channel);
        made.store(shared, TILE, threadIdx.x);
        if (blockIdx.x == 0) {
            store_statistics(moments, channel, rows, momentum, running_mean, running_var, mean, inv_std);
            if (coefficients) made.store(coefficients, channels, channel);
        }
    }
    __syncthreads();
    const Channels own(shared, TILE, threadIdx.x % LANES * WIDTH);
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        const bool valid = hold.has(k);
        const Elements result = own.normalise<RELU, RESIDUAL>(taken[k], added[k]);
        if (BITS) store_bits(bits, hold.at(k), valid ? open_bits(result) : 0, valid);
        if (valid) store_pack<STORAGE, WIDTH>(y, hold.at(k), result);
    }
    cluster_wait();
}

#define NORMALISE(NAME, RELU, RESIDUAL, BITS)                                                                        \
    CLUSTER_KERNEL NAME(STORAGE* y, uint8* bits, PARAMETER* running_mean, PARAMETER* running_var, STATISTIC* mean,   \
                        STATISTIC* inv_std, Value* coefficients, const STORAGE* x, const STORAGE* residual,          \
                        const PARAMETER* weight, const PARAMETER* bias, double eps, double momentum, int rows,       \
                        int channels, int rows_per_block) {                                                          \
        grid_dependency_synchronize();                                                                               \
        normalise<RELU, RESIDUAL, BITS>(y, bits, running_mean, running_var, mean, inv_std, coefficients, x, residual, \
                                        weight, bias, eps, momentum, rows, channels, rows_per_block);                \
    }

NORMALISE(apply, false, false, false)
NORMALISE(apply_relu, true, false, false)
NORMALISE(apply_add, false, true, false)
NORMALISE(apply_add_relu, true, true, false)
NORMALISE(apply_add_relu_bits, true, true, true)

// Where there are TWO parts of the gradient, their sum is taken.
template <Mask MASK, bool STORE, bool TWO>
__device__ __forceinline__ void differentiate(
    STORAGE* grad_x, STORAGE* gradient_out, PARAMETER* grad_weight, PARAMETER* grad_bias, const STORAGE* grad_y,
    const STORAGE* second_grad_y, const STORAGE* x, const PARAMETER* weight, const STATISTIC* mean, const STATISTIC* inv_std, const uint8* mask,
    double eps, int rows, int channels, int rows_per_block, int constant) {
    __shared__ double totals[2][TILE];
    __shared__ alignas(16) Value shared[4 * TILE];
    const Hold hold(rows, channels, rows_per_block);
    Elements inputs[HELD], gradients[HELD];
    const ReluMask<MASK> relu(mask, channels, hold.pack * WIDTH);
    uint32 bits[HELD];
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        if (hold.has(k)) {
            inputs[k] = load_pack<STORAGE, WIDTH>(x, hold.at(k));
            gradients[k] = load_pack<STORAGE, WIDTH>(grad_y, hold.at(k));
            if (TWO) gradients[k] = both(gradients[k], load_pack<STORAGE, WIDTH>(second_grad_y, hold.at(k)));
            bits[k] = relu.load(hold.at(k));
        }
    }
    GradientSums own(mean, hold.pack * WIDTH);
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        if (hold.has(k)) {
            gradients[k] = relu.apply(gradients[k], inputs[k], bits[k]);
            if (STORE) store_pack<STORAGE, WIDTH>(gradient_out, hold.at(k), gradients[k]);
            own.add(gradients[k], inputs[k]);
        }
    }
    double sums[2][WIDTH];
    own.widen(sums);
    cluster_sums(sums, totals);
    if (threadIdx.x < TILE) {
        const int channel = blockIdx.y * TILE + threadIdx.x;
        const Slopes slopes(weight, mean, inv_std, channel, eps, totals[0][threadIdx.x], totals[1][threadIdx.x], rows,
                            constant);
        slopes.store(shared, TILE, threadIdx.x);
        if (blockIdx.x == 0) slopes.store_parameters(grad_weight, grad_bias, channel);
    }
    __syncthreads();
    const SlopesOfPack slopes(shared, TILE, threadIdx.x % LANES * WIDTH);
#pragma unroll
    for (int k = 0; k < HELD; k++)
        if (hold.has(k)) store_pack<STORAGE, WIDTH>(grad_x, hold.at(k), slopes.apply(gradients[k], inputs[k]));
    cluster_wait();
}

#define DIFFERENTIATE(NAME, MASK, STORE, TWO)                                                                      \
    CLUSTER_KERNEL NAME(STORAGE* grad_x, STORAGE* gradient_out, PARAMETER* grad_weight, PARAMETER* grad_bias,      \
                        const STORAGE* grad_y, const STORAGE* second_grad_y, const STORAGE* x,                     \
                        const PARAMETER* weight, const STATISTIC* mean, const STATISTIC* inv_std,                  \
                        const uint8* mask, double eps, int rows, int channels, int rows_per_block, int constant) { \
        grid_dependency_synchronize();                                                                             \
        differentiate<MASK, STORE, TWO>(grad_x, gradient_out, grad_weight, grad_bias, grad_y, second_grad_y, x,    \
                                        weight, mean, inv_std, mask, eps, rows, channels, rows_per_block,          \
                                        constant);                                                                 \
    }

DIFFERENTIATE(gradients_open, Mask::NONE, false, false)
DIFFERENTIATE(gradients_recomputed, Mask::RECOMPUTED, false, false)
DIFFERENTIATE(gradients_bits, Mask::BITS, false, false)
DIFFERENTIATE(gradients_bits_store, Mask::BITS, true, false)
DIFFERENTIATE(gradients_bits_store_two, Mask::BITS, true, true)
