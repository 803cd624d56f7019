"""The appendix: what a CPU, one fast GPU, a second one, few bits and guesses add to the lesson.

An extra is an object in the place of one that the lesson already calls. `m5_kernels.engine` chooses
them; nothing else of the lesson names one.

    cpu               torch's own kernels where none of ours can run
    gguf              matrices in the few bits that a file has
    hopper            products of few rows, attention of long prompts, tokens to the host
    int8              what a matrix is, and products with it
    guesses           a runner in front of the runner, for steps with guesses
    tensor_parallel   where a decoder's layers lie: on several GPUs, a process each
"""
