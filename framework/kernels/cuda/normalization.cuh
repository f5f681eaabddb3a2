// What the batch normalisation kernels compute per channel and per pack of channels, shared by the two-pass and the
// one-launch kernels. STORAGE, PARAMETER, STATISTIC, WIDTH, Value and Elements are theirs.
#pragma once

// Sums of differences to the first element added, and of their squares. Since that element is one of those summed,
// the variance loses at most about a factor of their count in precision, whatever the mean is.
struct ShiftedSums {
    Value shift[WIDTH], sum[WIDTH], square[WIDTH];
    int count;

    __device__ __forceinline__ explicit ShiftedSums(const Elements& first) : count(0) {
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            shift[i] = get(first.at[i]);
            sum[i] = square[i] = 0;
        }
    }

    __device__ __forceinline__ void add(const Elements& values) {
        count++;
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            const Value difference = get(values.at[i]) - shift[i];
            sum[i] += difference;
            square[i] = multiply_add(difference, difference, square[i]);
        }
    }

    // The same sums about an origin that all threads share, in float64, where moving the origin costs no digits.
    __device__ __forceinline__ void about(const Elements& origin, double (&sums)[2][WIDTH]) const {
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            const double moved = static_cast<double>(shift[i]) - static_cast<double>(get(origin.at[i]));
            sums[0][i] = sum[i] + count * moved;
            sums[1][i] = square[i] + moved * (2 * static_cast<double>(sum[i]) + count * moved);
        }
    }
};

// WIDTH figures of neighbouring channels, 16 bytes at a time where WIDTH elements need as much.
__device__ __forceinline__ void load_figures(Value (&figures)[WIDTH], const Value* from) {
    constexpr int AT_ONCE = WIDTH * sizeof(Value) >= 16 ? 16 / sizeof(Value) : 1;
#pragma unroll
    for (int i = 0; i < WIDTH; i += AT_ONCE) {
        const Pack<Value, AT_ONCE> some = *reinterpret_cast<const Pack<Value, AT_ONCE>*>(from + i);
#pragma unroll
        for (int k = 0; k < AT_ONCE; k++) figures[i + k] = some.at[k];
    }
}

// y = scale · (x - mean) + bias for one channel.
struct Channel {
    Value mean, scale, bias;

    __device__ __forceinline__ void store(Value* coefficients, int channels, int channel) const {
        coefficients[channel] = mean;
        coefficients[channels + channel] = scale;
        coefficients[2 * channels + channel] = bias;
    }
};

// Mean, biased variance and 1/√(variance + eps) of one channel.
struct Moments {
    double mean, variance, inverse;

    __device__ __forceinline__ Moments(double origin, double sum, double square, int rows, double eps) {
        const double moved = sum / rows;
        mean = origin + moved;
        variance = (square - sum * moved) / rows;
        // Not fmax, which would make 0 of a NaN.
        if (variance < 0) variance = 0;
        inverse = inverse_root(variance + eps);
    }

    __device__ __forceinline__ Moments(double given_mean, double given_variance, double eps)
        : mean(given_mean), variance(given_variance), inverse(inverse_root(given_variance + eps)) {}

    __device__ __forceinline__ Channel channel(const PARAMETER* weight, const PARAMETER* bias, int channel) const {
        const double scale = weight ? static_cast<double>(get(weight[channel])) * inverse : inverse;
        return Channel{static_cast<Value>(mean), static_cast<Value>(scale),
                       bias ? static_cast<Value>(get(bias[channel])) : Value(0)};
    }
};

__device__ __forceinline__ void store_statistics(const Moments& moments, int channel, int rows, double momentum,
                                                 PARAMETER* running_mean, PARAMETER* running_var, STATISTIC* mean,
                                                 STATISTIC* inv_std) {
    typedef Real<PARAMETER> Running;
    mean[channel] = put<STATISTIC>(static_cast<Real<STATISTIC>>(moments.mean));
    inv_std[channel] = put<STATISTIC>(static_cast<Real<STATISTIC>>(moments.inverse));
    if (running_mean) {
        const double moved = (1 - momentum) * get(running_mean[channel]) + momentum * moments.mean;
        running_mean[channel] = put<PARAMETER>(static_cast<Running>(moved));
    }
    if (running_var) {
        const double unbiased = moments.variance * (static_cast<double>(rows) / (rows > 1 ? rows - 1 : 1));
        const double moved = (1 - momentum) * get(running_var[channel]) + momentum * unbiased;
        running_var[channel] = put<PARAMETER>(static_cast<Running>(moved));
    }
}

// The coefficients of a pack of channels.
struct Channels {
    Value mean[WIDTH], scale[WIDTH], bias[WIDTH];

    __device__ __forceinline__ Channels() {}

    __device__ __forceinline__ Channels(const Value* coefficients, int channels, int channel) {
        load_figures(mean, coefficients + channel);
        load_figures(scale, coefficients + channels + channel);
        load_figures(bias, coefficients + 2 * channels + channel);
    }

    // Forward and backward both come here, so that both see the same sign of the result.
    __device__ __forceinline__ Value at(int i, Value x) const { return multiply_add(x - mean[i], scale[i], bias[i]); }

    template <bool RELU, bool RESIDUAL>
    __device__ __forceinline__ Elements normalise(const Elements& x, const Elements& residual) const {
        Elements result;
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            Value value = at(i, get(x.at[i]));
            if (RESIDUAL) value += get(residual.at[i]);
            if (RELU && value < Value(0)) value = Value(0);  // so that NaN stays NaN
            result.at[i] = put<STORAGE>(value);
        }
        return result;
    }
};

// ---- the mask of the ReLU: one bit an element in the order of memory, or, where nothing was added before the ReLU,
// the coefficients from which its input can be had again

enum class Mask { NONE, RECOMPUTED, BITS };

__device__ __forceinline__ uint32 open_bits(const Elements& values) {
    uint32 bits = 0;
#pragma unroll
    for (int i = 0; i < WIDTH; i++) bits |= (is_open(get(values.at[i])) ? 1u : 0u) << i;
    return bits;
}

// Whole warps come here, their lanes with consecutive packs, the first of them with a multiple of eight elements.
__device__ __forceinline__ void store_bits(uint8* bits, int pack, uint32 own, bool valid) {
    constexpr int PACKS_IN_BYTE = 8 / WIDTH;
#pragma unroll
    for (int step = 1; step < PACKS_IN_BYTE; step *= 2) own |= __shfl_down_sync(ALL_LANES, own, step) << (step * WIDTH);
    if (valid && pack % PACKS_IN_BYTE == 0) bits[pack / PACKS_IN_BYTE] = static_cast<uint8>(own);
}

template <Mask MASK>
struct ReluMask {
    const uint8* bits;
    Channels coefficients;

    __device__ __forceinline__ ReluMask(const uint8* mask, int channels, int channel) : bits(mask) {
        if (MASK == Mask::RECOMPUTED)
            coefficients = Channels(reinterpret_cast<const Value*>(mask), channels, channel);
    }

    __device__ __forceinline__ uint32 load(int64 pack) const {
        if (MASK != Mask::BITS) return 0;
        return bits[pack * WIDTH / 8] >> (pack * WIDTH % 8);
    }

    __device__ __forceinline__ Elements apply(const Elements& gradient, const Elements& x, uint32 loaded) const {
        if (MASK == Mask::NONE) return gradient;
        Elements result;
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            const bool open =
                MASK == Mask::BITS ? (loaded >> i & 1) != 0 : is_open(coefficients.at(i, get(x.at[i])));
            result.at[i] = open ? gradient.at[i] : put<STORAGE>(Value(0));
        }
        return result;
    }
};

// The sum of two parts of a gradient.
__device__ __forceinline__ Elements both(const Elements& first, const Elements& second) {
    Elements result;
#pragma unroll
    for (int i = 0; i < WIDTH; i++) result.at[i] = put<STORAGE>(get(first.at[i]) + get(second.at[i]));
    return result;
}

// ---- backward: grad_x = scale · gradient - offset - slope · (x - mean)

// Sums of the gradient times the centred input.
struct ProductSums {
    Value mean[WIDTH], product[WIDTH];

    __device__ __forceinline__ ProductSums(const STATISTIC* given, int channel) {
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            mean[i] = static_cast<Value>(get(given[channel + i]));
            product[i] = 0;
        }
    }

    __device__ __forceinline__ void add(const Elements& gradient, const Elements& x) {
#pragma unroll
        for (int i = 0; i < WIDTH; i++)
            product[i] = multiply_add(get(gradient.at[i]), get(x.at[i]) - mean[i], product[i]);
    }
};

// The same, and those of the gradient.
struct GradientSums {
    Value sum[WIDTH];
    ProductSums products;

    __device__ __forceinline__ GradientSums(const STATISTIC* given, int channel) : products(given, channel) {
#pragma unroll
        for (int i = 0; i < WIDTH; i++) sum[i] = 0;
    }

    __device__ __forceinline__ void add(const Elements& gradient, const Elements& x) {
#pragma unroll
        for (int i = 0; i < WIDTH; i++) sum[i] += get(gradient.at[i]);
        products.add(gradient, x);
    }

    __device__ __forceinline__ void widen(double (&sums)[2][WIDTH]) const {
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            sums[0][i] = sum[i];
            sums[1][i] = products.product[i];
        }
    }
};

// The gradients of one channel's weight and bias, and the coefficients of its grad_x.
struct Slopes {
    double mean, scale, offset, slope, grad_weight, grad_bias;

    // Where eps >= 0, `inv_std` is a variance that it is to be had from. Statistics that are `constant` take no part.
    __device__ __forceinline__ Slopes(const PARAMETER* weight, const STATISTIC* means, const STATISTIC* inv_std,
                                      int channel, double eps, double sum, double product, int rows, int constant) {
        const double given = get(inv_std[channel]);
        const double inverse = eps >= 0 ? inverse_root(given + eps) : given;
        mean = get(means[channel]);
        scale = weight ? static_cast<double>(get(weight[channel])) * inverse : inverse;
        grad_weight = inverse * product;
        grad_bias = sum;
        const int count = rows > 0 ? rows : 1;
        offset = constant ? 0 : scale * sum / count;
        slope = constant ? 0 : scale * inverse * inverse * product / count;
    }

    __device__ __forceinline__ void store_parameters(PARAMETER* weight, PARAMETER* bias, int channel) const {
        if (weight) weight[channel] = put<PARAMETER>(static_cast<Real<PARAMETER>>(grad_weight));
        if (bias) bias[channel] = put<PARAMETER>(static_cast<Real<PARAMETER>>(grad_bias));
    }

    __device__ __forceinline__ void store(Value* coefficients, int channels, int channel) const {
        coefficients[channel] = static_cast<Value>(mean);
        coefficients[channels + channel] = static_cast<Value>(scale);
        coefficients[2 * channels + channel] = static_cast<Value>(offset);
        coefficients[3 * channels + channel] = static_cast<Value>(slope);
    }
};

struct SlopesOfPack {
    Value mean[WIDTH], scale[WIDTH], offset[WIDTH], slope[WIDTH];

    __device__ __forceinline__ SlopesOfPack() {}

    __device__ __forceinline__ SlopesOfPack(const Value* coefficients, int channels, int channel) {
        load_figures(mean, coefficients + channel);
        load_figures(scale, coefficients + channels + channel);
        load_figures(offset, coefficients + 2 * channels + channel);
        load_figures(slope, coefficients + 3 * channels + channel);
    }

    __device__ __forceinline__ Elements apply(const Elements& gradient, const Elements& x) const {
        Elements result;
#pragma unroll
        for (int i = 0; i < WIDTH; i++) {
            const Value centred = get(x.at[i]) - mean[i];
            result.at[i] = put<STORAGE>(
                multiply_add(scale[i], get(gradient.at[i]), -multiply_add(slope[i], centred, offset[i])));
        }
        return result;
    }
};
