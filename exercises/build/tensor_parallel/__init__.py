"""The course of several GPUs: a model cut over two processes."""
