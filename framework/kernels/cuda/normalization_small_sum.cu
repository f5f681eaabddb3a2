// relu(bn(x) + bn(shortcut)) of small images in one launch each way, as normalization_small.cu has it for one normalisation.
#include "common.cuh"

using Value = Real<STORAGE>;
typedef Pack<STORAGE, WIDTH> Elements;

#include "normalization.cuh"
#include "normalization_cluster.cuh"

// The first TILE threads of a warp each finish a channel: of x in the first warp, of the shortcut in the second.
struct Finisher {
    int branch, place, channel;

    __device__ __forceinline__ Finisher()
        : branch(threadIdx.x / 32), place(threadIdx.x % 32), channel(blockIdx.y * TILE + place) {}
    __device__ __forceinline__ bool has(int which) const { return branch == which && place < TILE; }
};

// One of the two normalisations.
struct Branch {
    const STORAGE* x;
    const PARAMETER* weight;
    const PARAMETER* bias;
    PARAMETER* running_mean;
    PARAMETER* running_var;
    STATISTIC* mean;
    STATISTIC* inv_std;
    double eps, momentum;

    __device__ __forceinline__ void add_up(double (&sums)[4][WIDTH], int at, const Hold& hold,
                                           const Elements (&taken)[HELD]) const {
        ShiftedSums own(taken[0]);
#pragma unroll
        for (int k = 0; k < HELD; k++)
            if (hold.has(k)) own.add(taken[k]);
        double both[2][WIDTH];
        own.about(load_pack<STORAGE, WIDTH>(x, hold.pack), both);
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            sums[at][i] = both[0][i];
            sums[at + 1][i] = both[1][i];
        }
    }

    __device__ __forceinline__ void finish(const Finisher& at, double sum, double square, int rows,
                                           Value* coefficients) const {
        const Moments moments(get(x[at.channel]), sum, square, rows, eps);
        moments.channel(weight, bias, at.channel).store(coefficients, TILE, at.place);
        if (blockIdx.x == 0)
            store_statistics(moments, at.channel, rows, momentum, running_mean, running_var, mean, inv_std);
    }
};

template <bool BITS>
__device__ __forceinline__ void normalise(STORAGE* y, uint8* bits, const Branch& main, const Branch& shortcut, int rows,
                                          int channels, int rows_per_block) {
    __shared__ double totals[4][TILE];
    __shared__ alignas(16) Value shared[2][3 * TILE];
    const Hold hold(rows, channels, rows_per_block);
    Elements taken[HELD], added[HELD];
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        if (hold.has(k)) {
            taken[k] = load_pack<STORAGE, WIDTH>(main.x, hold.at(k));
            added[k] = load_pack<STORAGE, WIDTH>(shortcut.x, hold.at(k));
        }
    }
    double sums[4][WIDTH] = {};
    if (hold.has(0)) {
        main.add_up(sums, 0, hold, taken);
        shortcut.add_up(sums, 2, hold, added);
    }
    cluster_sums(sums, totals);
    const Finisher at;
    if (at.has(0)) main.finish(at, totals[0][at.place], totals[1][at.place], rows, shared[0]);
    if (at.has(1)) shortcut.finish(at, totals[2][at.place], totals[3][at.place], rows, shared[1]);
    __syncthreads();
    const int channel = threadIdx.x % LANES * WIDTH;
    const Channels own(shared[0], TILE, channel), others(shared[1], TILE, channel);
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        const bool valid = hold.has(k);
        // Rounded to STORAGE as if it had been written to memory.
        const Elements residual = others.normalise<false, false>(added[k], added[k]);
        const Elements result = own.normalise<true, true>(taken[k], residual);
        if (BITS) store_bits(bits, hold.at(k), valid ? open_bits(result) : 0, valid);
        if (valid) store_pack<STORAGE, WIDTH>(y, hold.at(k), result);
    }
    cluster_wait();
}

#define NORMALISE(NAME, BITS)                                                                                     \
    CLUSTER_KERNEL NAME(STORAGE* y, uint8* bits, Branch main, Branch shortcut, int rows, int channels,            \
                        int rows_per_block) {                                                                     \
        grid_dependency_synchronize();                                                                            \
        normalise<BITS>(y, bits, main, shortcut, rows, channels, rows_per_block);                                 \
    }

NORMALISE(apply_sum_relu, false)
NORMALISE(apply_sum_relu_bits, true)

// The same in backward, and where the gradients of its parameters go.
struct GradientBranch {
    const STORAGE* x;
    const PARAMETER* weight;
    const STATISTIC* mean;
    const STATISTIC* inv_std;
    PARAMETER* grad_weight;
    PARAMETER* grad_bias;

    __device__ __forceinline__ void finish(const Finisher& at, double sum, double product, int rows,
                                           Value* coefficients) const {
        const Slopes slopes(weight, mean, inv_std, at.channel, -1, sum, product, rows, 0);
        slopes.store(coefficients, TILE, at.place);
        if (blockIdx.x == 0) slopes.store_parameters(grad_weight, grad_bias, at.channel);
    }
};

__device__ __forceinline__ void store(STORAGE* grad_x, const SlopesOfPack& slopes, const Hold& hold,
                                      const Elements (&gradients)[HELD], const Elements (&inputs)[HELD]) {
#pragma unroll
    for (int k = 0; k < HELD; k++)
        if (hold.has(k)) store_pack<STORAGE, WIDTH>(grad_x, hold.at(k), slopes.apply(gradients[k], inputs[k]));
}

// Where there are TWO parts of the gradient, their sum is taken. Either image's gradient may be left out, and may be
// written over a part of grad_y: a thread has read what it writes over.
template <bool TWO>
__device__ __forceinline__ void differentiate(STORAGE* grad_x, STORAGE* grad_shortcut, const STORAGE* grad_y,
                                              const STORAGE* second_grad_y, const uint8* mask,
                                              const GradientBranch& main, const GradientBranch& shortcut, int rows,
                                              int channels, int rows_per_block) {
    __shared__ double totals[3][TILE];
    __shared__ alignas(16) Value shared[2][4 * TILE];
    const Hold hold(rows, channels, rows_per_block);
    const ReluMask<Mask::BITS> relu(mask, channels, hold.pack * WIDTH);
    Elements inputs[HELD], shortcuts[HELD], gradients[HELD];
    uint32 bits[HELD];
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        if (hold.has(k)) {
            inputs[k] = load_pack<STORAGE, WIDTH>(main.x, hold.at(k));
            shortcuts[k] = load_pack<STORAGE, WIDTH>(shortcut.x, hold.at(k));
            gradients[k] = load_pack<STORAGE, WIDTH>(grad_y, hold.at(k));
            if (TWO) gradients[k] = both(gradients[k], load_pack<STORAGE, WIDTH>(second_grad_y, hold.at(k)));
            bits[k] = relu.load(hold.at(k));
        }
    }
    GradientSums own(main.mean, hold.pack * WIDTH);
    ProductSums others(shortcut.mean, hold.pack * WIDTH);
#pragma unroll
    for (int k = 0; k < HELD; k++) {
        if (hold.has(k)) {
            gradients[k] = relu.apply(gradients[k], inputs[k], bits[k]);
            own.add(gradients[k], inputs[k]);
            others.add(gradients[k], shortcuts[k]);
        }
    }
    double sums[3][WIDTH];
#pragma unroll
    for (int i = 0; i < WIDTH; i++) {
        sums[0][i] = own.sum[i];
        sums[1][i] = own.products.product[i];
        sums[2][i] = others.product[i];
    }
    cluster_sums(sums, totals);
    const Finisher at;
    if (at.has(0)) main.finish(at, totals[0][at.place], totals[1][at.place], rows, shared[0]);
    if (at.has(1)) shortcut.finish(at, totals[0][at.place], totals[2][at.place], rows, shared[1]);
    __syncthreads();
    const int channel = threadIdx.x % LANES * WIDTH;
    // One after the other: the coefficients of both at once would not fit the registers.
    if (grad_x) store(grad_x, SlopesOfPack(shared[0], TILE, channel), hold, gradients, inputs);
    if (grad_shortcut) store(grad_shortcut, SlopesOfPack(shared[1], TILE, channel), hold, gradients, shortcuts);
    cluster_wait();
}

#define DIFFERENTIATE(NAME, TWO)                                                                                  \
    CLUSTER_KERNEL NAME(STORAGE* grad_x, STORAGE* grad_shortcut, const STORAGE* grad_y,                           \
                        const STORAGE* second_grad_y, const uint8* mask, GradientBranch main,                     \
                        GradientBranch shortcut, int rows, int channels, int rows_per_block) {                    \
        grid_dependency_synchronize();                                                                            \
        differentiate<TWO>(grad_x, grad_shortcut, grad_y, second_grad_y, mask, main, shortcut, rows, channels,    \
                           rows_per_block);                                                                       \
    }

DIFFERENTIATE(gradients_of_sum, false)
DIFFERENTIATE(gradients_of_sum_two, true)
