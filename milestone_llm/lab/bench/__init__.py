"""How fast is an engine? What all benches share, and the bench of a server.

    python -m mN_xxx.bench                        an engine without a server: `command` and the rest
    python -m milestone_llm.lab.bench.serving     clients over HTTP: `serving`, `open_loop`,
                                                  `running_server`

`m5_kernels.tools` has what M5's bench adds, and `kernel_bench` for single kernels.
"""
