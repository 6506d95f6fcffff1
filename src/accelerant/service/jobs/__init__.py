"""Jobs of the service: the store, the queue, the worker processes, and JobService, which puts them together.

model.py     JobRequest, Job, JobState, QueueStats
service.py   JobService: call, submit, get, result, list, cancel, drain
queue.py     the fair queue of short calls, and their merging into launches
store.py     durable jobs in SQLite or PostgreSQL; migrations/ has its schema
workers.py   the server's side of the worker processes
worker.py    the program of a worker process; Context
wire.py      arrays as bytes between them, and in files
"""
