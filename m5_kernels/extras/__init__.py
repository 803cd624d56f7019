"""The appendix: what today's models and machines add to the lesson.

An extra is an object that takes the place of one that the lesson calls. The rooms are sorted by
what brings an extra in, which is the device, the model or a field of `EngineConfig`:

    families          norms, ropes and activations of other models    the model
    devices           parts that are faster on a CPU or a GPU       the device
    quantization      weights in few bits                           `quantization`
    experts           an MLP of many, of which a token meets some   the model
    spec_decode       a runner that verifies draft tokens           `speculation`
    tensor_parallel   a part of each layer, and sums over GPUs      `tensor_parallel_size`

`m5_kernels.backends` chooses them. It is the only file of the lesson that imports one.
"""
