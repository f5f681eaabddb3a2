// Batch normalisation of images that lie densely NHWC, as [rows, channels], in two passes over the data each way.
//
// STORAGE is the type of the activations, PARAMETER that of weight, bias, their gradients and the running figures,
// STATISTIC that of mean and inv_std. WIDTH elements are moved at once; `channels` is a multiple of it.
#include "common.cuh"

using Value = Real<STORAGE>;
typedef Pack<STORAGE, WIDTH> Elements;

#include "normalization.cuh"
#include "normalization_passes.cuh"

KERNEL statistics(const STORAGE* x, const PARAMETER* weight, const PARAMETER* bias, PARAMETER* running_mean,
                  PARAMETER* running_var, STATISTIC* mean, STATISTIC* inv_std, Value* coefficients, double2* parts,
                  uint32* counters, double eps, double momentum, int rows, int channels, int rows_per_block) {
    grid_dependency_synchronize();
    constexpr int UNROLL = 8;
    __shared__ double2 totals[TILE];
    const int packs = channels / WIDTH;
    const Tile tile(rows, packs, rows_per_block);
    double sums[2][WIDTH] = {};
    if (tile.active && tile.row < tile.stop) {
        const Elements origin = load_pack<STORAGE, WIDTH>(x, tile.pack);
        ShiftedSums own(load_pack<STORAGE, WIDTH>(x, static_cast<int64>(tile.row) * packs + tile.pack));
        for (int row = tile.row; row < tile.stop; row += UNROLL * ROWS) {
            Elements taken[UNROLL];
#pragma unroll
            for (int k = 0; k < UNROLL; k++)
                if (row + k * ROWS < tile.stop)
                    taken[k] = load_pack<STORAGE, WIDTH>(x, static_cast<int64>(row + k * ROWS) * packs + tile.pack);
#pragma unroll
            for (int k = 0; k < UNROLL; k++)
                if (row + k * ROWS < tile.stop) own.add(taken[k]);
        }
        own.about(origin, sums);
    }
    if (!finish_sums(sums, parts, counters, totals)) return;
    const int channel = blockIdx.y * TILE + threadIdx.x;
    if (threadIdx.x < TILE && channel < channels) {
        const double origin = rows > 0 ? static_cast<double>(get(x[channel])) : 0.0;
        const Moments moments(origin, totals[threadIdx.x].x, totals[threadIdx.x].y, rows, eps);
        store_statistics(moments, channel, rows, momentum, running_mean, running_var, mean, inv_std);
        const Channel made = moments.channel(weight, bias, channel);
        made.store(coefficients, channels, channel);
    }
}

// The coefficients where mean and variance are given: outside training.
KERNEL given_statistics(const PARAMETER* weight, const PARAMETER* bias, const PARAMETER* running_mean,
                        const PARAMETER* running_var, Value* coefficients, double eps, int channels) {
    grid_dependency_synchronize();
    const int channel = blockIdx.x * THREADS + threadIdx.x;
    if (channel >= channels) return;
    const Moments moments(get(running_mean[channel]), get(running_var[channel]), eps);
    moments.channel(weight, bias, channel).store(coefficients, channels, channel);
}

template <bool RELU, bool RESIDUAL, bool BITS>
__device__ __forceinline__ void apply(STORAGE* y, uint8* bits, const STORAGE* x, const STORAGE* residual,
                                      const Value* coefficients, int total, int channels) {
    constexpr int UNROLL = 4;
    const Walk walk(channels / WIDTH);
    const Channels own(coefficients, channels, walk.channel);
    // Warps go on together until all lanes are done: neighbours put their bits together.
    for (int i = walk.first; i - static_cast<int>(threadIdx.x % 32) < total; i += UNROLL * walk.step) {
        Elements taken[UNROLL], added[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            if (i + k * walk.step < total) {
                taken[k] = load_pack<STORAGE, WIDTH>(x, i + k * walk.step);
                if (RESIDUAL) added[k] = load_pack<STORAGE, WIDTH>(residual, i + k * walk.step);
            }
        }
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            const bool valid = i + k * walk.step < total;
            const Elements result = own.normalise<RELU, RESIDUAL>(taken[k], added[k]);
            if (BITS) store_bits(bits, i + k * walk.step, valid ? open_bits(result) : 0, valid);
            if (valid) store_pack<STORAGE, WIDTH>(y, i + k * walk.step, result);
        }
    }
}

#define APPLY(NAME, RELU, RESIDUAL, BITS)                                                                    \
    KERNEL NAME(STORAGE* y, uint8* bits, const STORAGE* x, const STORAGE* residual, const Value* coefficients, \
                int total, int channels) {                                                                   \
        grid_dependency_synchronize();                                                                       \
        apply<RELU, RESIDUAL, BITS>(y, bits, x, residual, coefficients, total, channels);                    \
    }

APPLY(apply, false, false, false)
APPLY(apply_relu, true, false, false)
APPLY(apply_add, false, true, false)
APPLY(apply_add_relu, true, true, false)
APPLY(apply_add_relu_bits, true, true, true)

// Sums of the gradient and of the gradient times the centred input. `gradient_out`, where it is asked for, gets the
// gradient behind the ReLU, which is the residual's.
// Where there are TWO parts of the gradient, their sum is taken.
template <Mask MASK, bool STORE, bool TWO>
__device__ __forceinline__ void sum_gradients(
    STORAGE* gradient_out, PARAMETER* grad_weight, PARAMETER* grad_bias, Value* coefficients, const STORAGE* grad_y,
    const STORAGE* second_grad_y, const STORAGE* x, const PARAMETER* weight, const STATISTIC* mean,
    const STATISTIC* inv_std, const uint8* mask, double2* parts, uint32* counters, double eps, int rows, int channels,
    int rows_per_block, int constant) {
    constexpr int UNROLL = 4;
    __shared__ double2 totals[TILE];
    const int packs = channels / WIDTH;
    const Tile tile(rows, packs, rows_per_block);
    double sums[2][WIDTH] = {};
    if (tile.active && tile.row < tile.stop) {
        const ReluMask<MASK> relu(mask, channels, tile.pack * WIDTH);
        GradientSums own(mean, tile.pack * WIDTH);
        for (int row = tile.row; row < tile.stop; row += UNROLL * ROWS) {
            Elements inputs[UNROLL], gradients[UNROLL], others[UNROLL];
            uint32 bits[UNROLL];
#pragma unroll
            for (int k = 0; k < UNROLL; k++) {
                if (row + k * ROWS < tile.stop) {
                    const int64 i = static_cast<int64>(row + k * ROWS) * packs + tile.pack;
                    inputs[k] = load_pack<STORAGE, WIDTH>(x, i);
                    gradients[k] = load_pack<STORAGE, WIDTH>(grad_y, i);
                    if (TWO) others[k] = load_pack<STORAGE, WIDTH>(second_grad_y, i);
                    bits[k] = relu.load(i);
                }
            }
#pragma unroll
            for (int k = 0; k < UNROLL; k++) {
                if (row + k * ROWS < tile.stop) {
                    const Elements total = TWO ? both(gradients[k], others[k]) : gradients[k];
                    const Elements gradient = relu.apply(total, inputs[k], bits[k]);
                    if (STORE)
                        store_pack<STORAGE, WIDTH>(
                            gradient_out, static_cast<int64>(row + k * ROWS) * packs + tile.pack, gradient);
                    own.add(gradient, inputs[k]);
                }
            }
        }
        own.widen(sums);
    }
    if (!finish_sums(sums, parts, counters, totals)) return;
    const int channel = blockIdx.y * TILE + threadIdx.x;
    if (threadIdx.x < TILE && channel < channels) {
        const Slopes slopes(weight, mean, inv_std, channel, eps, totals[threadIdx.x].x, totals[threadIdx.x].y, rows,
                            constant);
        slopes.store_parameters(grad_weight, grad_bias, channel);
        slopes.store(coefficients, channels, channel);
    }
}

#define SUM_GRADIENTS(NAME, MASK, STORE, TWO)                                                                      \
    KERNEL NAME(STORAGE* gradient_out, PARAMETER* grad_weight, PARAMETER* grad_bias, Value* coefficients,          \
                const STORAGE* grad_y, const STORAGE* second_grad_y, const STORAGE* x, const PARAMETER* weight,    \
                const STATISTIC* mean, const STATISTIC* inv_std, const uint8* mask, double2* parts,                \
                uint32* counters, double eps, int rows, int channels, int rows_per_block, int constant) {          \
        grid_dependency_synchronize();                                                                             \
        sum_gradients<MASK, STORE, TWO>(gradient_out, grad_weight, grad_bias, coefficients, grad_y, second_grad_y, \
                                        x, weight, mean, inv_std, mask, parts, counters, eps, rows, channels,      \
                                        rows_per_block, constant);                                                 \
    }

SUM_GRADIENTS(sum_gradients_open, Mask::NONE, false, false)
SUM_GRADIENTS(sum_gradients_recomputed, Mask::RECOMPUTED, false, false)
SUM_GRADIENTS(sum_gradients_recomputed_store, Mask::RECOMPUTED, true, false)
SUM_GRADIENTS(sum_gradients_bits, Mask::BITS, false, false)
SUM_GRADIENTS(sum_gradients_bits_store, Mask::BITS, true, false)
SUM_GRADIENTS(sum_gradients_bits_store_two, Mask::BITS, true, true)

template <Mask MASK>
__device__ __forceinline__ void apply_gradients(STORAGE* grad_x, const STORAGE* grad_y, const STORAGE* x,
                                                const uint8* mask, const Value* coefficients, int total, int channels) {
    constexpr int UNROLL = 4;
    const Walk walk(channels / WIDTH);
    const ReluMask<MASK> relu(mask, channels, walk.channel);
    const SlopesOfPack own(coefficients, channels, walk.channel);
    for (int i = walk.first; i < total; i += UNROLL * walk.step) {
        Elements inputs[UNROLL], gradients[UNROLL];
        uint32 bits[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            if (i + k * walk.step < total) {
                inputs[k] = load_pack<STORAGE, WIDTH>(x, i + k * walk.step);
                gradients[k] = load_pack<STORAGE, WIDTH>(grad_y, i + k * walk.step);
                bits[k] = relu.load(i + k * walk.step);
            }
        }
#pragma unroll
        for (int k = 0; k < UNROLL; k++)
            if (i + k * walk.step < total)
                store_pack<STORAGE, WIDTH>(
                    grad_x, i + k * walk.step, own.apply(relu.apply(gradients[k], inputs[k], bits[k]), inputs[k]));
    }
}

#define APPLY_GRADIENTS(NAME, MASK)                                                                                \
    KERNEL NAME(STORAGE* grad_x, const STORAGE* grad_y, const STORAGE* x, const uint8* mask, const Value* coefficients, \
                int total, int channels) {                                                                         \
        grid_dependency_synchronize();                                                                             \
        apply_gradients<MASK>(grad_x, grad_y, x, mask, coefficients, total, channels);                             \
    }

APPLY_GRADIENTS(apply_gradients_open, Mask::NONE)
APPLY_GRADIENTS(apply_gradients_recomputed, Mask::RECOMPUTED)
APPLY_GRADIENTS(apply_gradients_bits, Mask::BITS)
