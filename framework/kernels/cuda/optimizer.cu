// One step of stochastic gradient descent for up to MOST tensors of type TYPE in one launch. The addresses of all
// tensors come as an argument of the kernel, so that a captured launch holds them as well.
#include "common.cuh"

using Value = Real<TYPE>;
constexpr int WIDTH = 16 / sizeof(TYPE);
constexpr int UNROLL = 4;
// The elements of one block, as in optimizer.py.
constexpr int CHUNK = THREADS * UNROLL * WIDTH;

struct Tensors {
    TYPE* parameter[MOST];
    TYPE* buffer[MOST];
    const TYPE* gradient[MOST];
};

struct Chunks {
    int64 count[MOST];    // the elements of each tensor
    int first[MOST + 1];  // the first block of each tensor, and behind the last one the number of blocks
    int tensors;
};

struct Step {
    Value rate, momentum, kept, decay;  // kept: the share of the gradient that goes into the buffer
    bool has_buffer, is_first, nesterov;

    __device__ __forceinline__ void apply(Value& parameter, Value& buffer, Value gradient) const {
        Value update = multiply_add(decay, parameter, gradient);
        if (has_buffer) {
            buffer = is_first ? update : multiply_add(kept, update, momentum * buffer);
            update = nesterov ? multiply_add(momentum, buffer, update) : buffer;
        }
        parameter = multiply_add(-rate, update, parameter);
    }
};

KERNEL sgd_step(const __grid_constant__ Tensors tensors, double rate, double momentum, double kept, double decay,
                int64 flags, const __grid_constant__ Chunks chunks) {
    grid_dependency_synchronize();
    int low = 0, high = chunks.tensors - 1;
    const int block = blockIdx.x;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (chunks.first[middle] <= block)
            low = middle;
        else
            high = middle - 1;
    }
    const Step step = {static_cast<Value>(rate), static_cast<Value>(momentum), static_cast<Value>(kept),
                       static_cast<Value>(decay), (flags & 1) != 0, (flags & 2) != 0, (flags & 4) != 0};
    TYPE* parameter = tensors.parameter[low];
    TYPE* buffer = tensors.buffer[low];
    const TYPE* gradient = tensors.gradient[low];
    const int64 start = static_cast<int64>(block - chunks.first[low]) * CHUNK;
    const int64 stop = min(chunks.count[low], start + CHUNK);
    const bool aligned = ((reinterpret_cast<uint64>(parameter) | reinterpret_cast<uint64>(buffer) |
                           reinterpret_cast<uint64>(gradient)) % 16) == 0;
    if (aligned && stop - start == CHUNK) {
        Pack<TYPE, WIDTH> p[UNROLL], b[UNROLL], g[UNROLL];
        const int64 first = start / WIDTH + threadIdx.x;
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
            p[k] = load_pack<TYPE, WIDTH>(parameter, first + k * THREADS);
            g[k] = load_pack<TYPE, WIDTH>(gradient, first + k * THREADS);
            if (step.has_buffer && !step.is_first) b[k] = load_pack<TYPE, WIDTH>(buffer, first + k * THREADS);
        }
#pragma unroll
        for (int k = 0; k < UNROLL; k++) {
#pragma unroll
            for (int i = 0; i < WIDTH; i++) {
                Value value = get(p[k].at[i]), held = get(b[k].at[i]);
                step.apply(value, held, get(g[k].at[i]));
                p[k].at[i] = put<TYPE>(value);
                b[k].at[i] = put<TYPE>(held);
            }
            store_pack<TYPE, WIDTH>(parameter, first + k * THREADS, p[k]);
            if (step.has_buffer) store_pack<TYPE, WIDTH>(buffer, first + k * THREADS, b[k]);
        }
        return;
    }
    for (int64 i = start + threadIdx.x; i < stop; i += THREADS) {
        Value value = get(parameter[i]), held = step.has_buffer && !step.is_first ? get(buffer[i]) : Value(0);
        step.apply(value, held, get(gradient[i]));
        parameter[i] = put<TYPE>(value);
        if (step.has_buffer) buffer[i] = put<TYPE>(held);
    }
}
