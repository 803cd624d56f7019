"""The appendix: what a CPU, one fast GPU, several GPUs, few bits and draft tokens add to M5.

None of it is needed to understand M5. An extra is an object that takes the place of one which the
lesson already calls. `m5_kernels.backends` chooses extras, and imports them when they are chosen;
no other file of the lesson names one.

    extra             in place of                                    chosen by
    cpu               the entries of `DecoderOps`                    no GPU
    hopper            `linear`, `attention`; `copy_to_host`          a GPU, by what it can
    int8, gguf        `linear`                                       `quantization`
    tensor_parallel   `Group`, `Shard`; `embed_norm`, `add_norm`,    `tensor_parallel_size`
                      `all_logits`: sums over all GPUs
    spec_decode       `ModelRunner`, for steps with draft tokens     `speculation`
"""
