// relu(bn(x) + bn(shortcut)) of images that lie densely NHWC, in one pass over both where two normalisations take one each:
// what follows `statistics` of x and of the shortcut, and both passes of backward. Types as in normalization.cu.
#include "common.cuh"

using Value = Real<STORAGE>;
typedef Pack<STORAGE, WIDTH> Elements;

#include "normalization.cuh"
#include "normalization_passes.cuh"

template <bool BITS>
__device__ __forceinline__ void apply(STORAGE* y, uint8* bits, const STORAGE* x, const STORAGE* shortcut,
                                      const Value* coefficients, const Value* shortcut_coefficients, int total,
                                      int channels) {
    constexpr int UNROLL = 4;
    const Walk walk(channels / WIDTH);
    const Channels own(coefficients, channels, walk.channel), others(shortcut_coefficients, channels, walk.channel);
    // Warps go on together until all lanes are done: neighbours put their bits together.
    for (int i = walk.first; i - static_cast<int>(threadIdx.x % 32) < total; i += UNROLL * walk.step) {
        Elements taken[UNROLL], added[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            if (i + k * walk.step < total) {
                taken[k] = load_pack<STORAGE, WIDTH>(x, i + k * walk.step);
                added[k] = load_pack<STORAGE, WIDTH>(shortcut, i + k * walk.step);
            }
        }
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            const bool valid = i + k * walk.step < total;
            // Rounded to STORAGE as if it had been written to memory.
            const Elements residual = others.normalise<false, false>(added[k], added[k]);
            const Elements result = own.normalise<true, true>(taken[k], residual);
            if (BITS) store_bits(bits, i + k * walk.step, valid ? open_bits(result) : 0, valid);
            if (valid) store_pack<STORAGE, WIDTH>(y, i + k * walk.step, result);
        }
    }
}

#define APPLY(NAME, BITS)                                                                                         \
    KERNEL NAME(STORAGE* y, uint8* bits, const STORAGE* x, const STORAGE* shortcut, const Value* coefficients,    \
                const Value* shortcut_coefficients, int total, int channels) {                                    \
        grid_dependency_synchronize();                                                                            \
        apply<BITS>(y, bits, x, shortcut, coefficients, shortcut_coefficients, total, channels);                  \
    }

APPLY(apply_sum_relu, false)
APPLY(apply_sum_relu_bits, true)

// One of the two normalisations: what was normalised and by what, and where the gradients of its parameters go.
struct Branch {
    const STORAGE* x;
    const PARAMETER* weight;
    const STATISTIC* mean;
    const STATISTIC* inv_std;
    PARAMETER* grad_weight;
    PARAMETER* grad_bias;

    // Sums over all rows give the gradients of its parameters, and the coefficients for the second pass.
    __device__ __forceinline__ void finish(double (&sums)[2][WIDTH], double2* parts, uint32* counters,
                                           Value* coefficients, int rows, int channels) const {
        __shared__ double2 totals[TILE];
        if (!finish_sums(sums, parts, counters, totals)) return;
        const int channel = blockIdx.y * TILE + threadIdx.x;
        if (threadIdx.x < TILE && channel < channels) {
            const Slopes slopes(weight, mean, inv_std, channel, -1, totals[threadIdx.x].x, totals[threadIdx.x].y, rows, 0);
            slopes.store_parameters(grad_weight, grad_bias, channel);
            slopes.store(coefficients, channels, channel);
        }
    }
};

// The gradient behind the ReLU is not stored: to read its parts and the bits again takes no more bytes than to write and
// read it would.
template <bool TWO>
__device__ __forceinline__ Elements masked(const ReluMask<Mask::BITS>& relu, const Elements& first,
                                           const Elements& second, const Elements& x, uint32 bits) {
    return relu.apply(TWO ? both(first, second) : first, x, bits);
}

template <bool TWO>
__device__ __forceinline__ void sum_gradients(const Branch& main, const Branch& shortcut, Value* coefficients,
                                              const STORAGE* grad_y, const STORAGE* second_grad_y, const uint8* mask,
                                              double2* parts, uint32* counters, int rows, int channels,
                                              int rows_per_block) {
    constexpr int UNROLL = 4;
    const int packs = channels / WIDTH;
    const Tile tile(rows, packs, rows_per_block);
    double sums[2][WIDTH] = {}, shortcut_sums[2][WIDTH] = {};
    if (tile.active && tile.row < tile.stop) {
        const ReluMask<Mask::BITS> relu(mask, channels, tile.pack * WIDTH);
        GradientSums own(main.mean, tile.pack * WIDTH);
        ProductSums others(shortcut.mean, tile.pack * WIDTH);
        for (int row = tile.row; row < tile.stop; row += UNROLL * ROWS) {
            Elements inputs[UNROLL], shortcuts[UNROLL], first[UNROLL], second[UNROLL];
            uint32 bits[UNROLL];
#pragma unroll
            for (int k = 0; k < UNROLL; k++) {
                if (row + k * ROWS < tile.stop) {
                    const int64 i = static_cast<int64>(row + k * ROWS) * packs + tile.pack;
                    inputs[k] = load_pack<STORAGE, WIDTH>(main.x, i);
                    shortcuts[k] = load_pack<STORAGE, WIDTH>(shortcut.x, i);
                    first[k] = load_pack<STORAGE, WIDTH>(grad_y, i);
                    if (TWO) second[k] = load_pack<STORAGE, WIDTH>(second_grad_y, i);
                    bits[k] = relu.load(i);
                }
            }
#pragma unroll
            for (int k = 0; k < UNROLL; k++) {
                if (row + k * ROWS < tile.stop) {
                    const Elements gradient = masked<TWO>(relu, first[k], second[k], inputs[k], bits[k]);
                    own.add(gradient, inputs[k]);
                    others.add(gradient, shortcuts[k]);
                }
            }
        }
        own.widen(sums);
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            shortcut_sums[0][i] = sums[0][i];
            shortcut_sums[1][i] = others.product[i];
        }
    }
    main.finish(sums, parts, counters, coefficients, rows, channels);
    shortcut.finish(shortcut_sums, parts + static_cast<int64>(gridDim.y) * gridDim.x * TILE, counters + gridDim.y,
                    coefficients + 4 * channels, rows, channels);
}

#define SUM_GRADIENTS(NAME, TWO)                                                                                  \
    KERNEL NAME(Branch main, Branch shortcut, Value* coefficients, const STORAGE* grad_y,                         \
                const STORAGE* second_grad_y, const uint8* mask, double2* parts, uint32* counters, int rows,      \
                int channels, int rows_per_block) {                                                               \
        grid_dependency_synchronize();                                                                            \
        sum_gradients<TWO>(main, shortcut, coefficients, grad_y, second_grad_y, mask, parts, counters, rows,      \
                           channels, rows_per_block);                                                             \
    }

SUM_GRADIENTS(sum_gradients_of_sum, false)
SUM_GRADIENTS(sum_gradients_of_sum_two, true)

// Either gradient may be left out, and may be written over a part of grad_y: a thread has read what it writes over.
template <bool TWO>
__device__ __forceinline__ void apply_gradients(STORAGE* grad_x, STORAGE* grad_shortcut, const STORAGE* grad_y,
                                                const STORAGE* second_grad_y, const STORAGE* x,
                                                const STORAGE* shortcut, const uint8* mask, const Value* coefficients,
                                                int total, int channels) {
    constexpr int UNROLL = 2;
    const Walk walk(channels / WIDTH);
    const ReluMask<Mask::BITS> relu(mask, channels, walk.channel);
    const SlopesOfPack own(coefficients, channels, walk.channel);
    const SlopesOfPack others(coefficients + 4 * channels, channels, walk.channel);
    for (int i = walk.first; i < total; i += UNROLL * walk.step) {
        Elements inputs[UNROLL], shortcuts[UNROLL], first[UNROLL], second[UNROLL];
        uint32 bits[UNROLL];
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            if (i + k * walk.step < total) {
                inputs[k] = load_pack<STORAGE, WIDTH>(x, i + k * walk.step);
                shortcuts[k] = load_pack<STORAGE, WIDTH>(shortcut, i + k * walk.step);
                first[k] = load_pack<STORAGE, WIDTH>(grad_y, i + k * walk.step);
                if (TWO) second[k] = load_pack<STORAGE, WIDTH>(second_grad_y, i + k * walk.step);
                bits[k] = relu.load(i + k * walk.step);
            }
        }
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            if (i + k * walk.step < total) {
                const Elements gradient = masked<TWO>(relu, first[k], second[k], inputs[k], bits[k]);
                if (grad_x)
                    store_pack<STORAGE, WIDTH>(grad_x, i + k * walk.step, own.apply(gradient, inputs[k]));
                if (grad_shortcut)
                    store_pack<STORAGE, WIDTH>(grad_shortcut, i + k * walk.step, others.apply(gradient, shortcuts[k]));
            }
        }
    }
}

#define APPLY_GRADIENTS(NAME, TWO)                                                                                \
    KERNEL NAME(STORAGE* grad_x, STORAGE* grad_shortcut, const STORAGE* grad_y, const STORAGE* second_grad_y,     \
                const STORAGE* x, const STORAGE* shortcut, const uint8* mask, const Value* coefficients,          \
                int total, int channels) {                                                                        \
        grid_dependency_synchronize();                                                                            \
        apply_gradients<TWO>(grad_x, grad_shortcut, grad_y, second_grad_y, x, shortcut, mask, coefficients,       \
                             total, channels);                                                                    \
    }

APPLY_GRADIENTS(apply_gradients_of_sum, false)
APPLY_GRADIENTS(apply_gradients_of_sum_two, true)
