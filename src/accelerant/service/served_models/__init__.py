"""Language models and sentence encoders behind OpenAI's routes, each in a process of its own.

`bodies` reads requests, `routes` answers them, `process` is the server's side of a model's process and `worker` the
process itself, which admits requests to the engine by `admission`.
"""
