"""Starts Flower's commands as forks of one process that has imported them: an import takes 2 to 5 s, a fork none.

    python warm_start.py SOCKET         serves
    python warm_start.py SOCKET NAME... asks for a command, as the scripts do that stand for Flower's in PATH

Each command runs in a process of its own with its own arguments, as when it is started by its name. Prints its process.
"""

import json
import os
import socket
import sys

if len(sys.argv) > 2:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(sys.argv[1])
        client.sendall(json.dumps(sys.argv[2:]).encode())
        client.shutdown(socket.SHUT_WR)
        print(client.recv(32).decode())
    sys.exit()

import contextlib
import gc
import importlib
import importlib.metadata
import signal
import time

time.sleep = lambda seconds, sleep=time.sleep: sleep(min(seconds, 0.2))  # Flower's processes look for work every 3 s

SCRIPTS = importlib.metadata.distribution("flwr").entry_points.select(group="console_scripts")
COMMANDS = {script.name: script.value for script in SCRIPTS}
for name in ("flwr", "flower-superlink", "flower-supernode", "flower-superexec", "flwr-serverapp", "flwr-clientapp"):
    importlib.import_module(COMMANDS[name].partition(":")[0])
importlib.import_module("flwr.superlink.main")
sums = importlib.import_module("sums")  # torch and Accelerant with it
sums.mpc.secure_aggregate([[1.0, 2.0]] * 3, threshold=2)  # compiles the kernels once
del sys.modules["sums"]  # each app loads its own


def reap(*_):
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


signal.signal(signal.SIGCHLD, reap)
gc.freeze()
with socket.socket(socket.AF_UNIX) as server:
    server.bind(sys.argv[1])
    server.listen(64)
    while True:
        connection, _ = server.accept()
        with connection.makefile("rb") as file:
            data = file.read()
        child = os.fork()
        if child:
            connection.sendall(str(child).encode())
            connection.close()
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        connection.close()
        server.close()
        sys.argv = json.loads(data)
        module, _, function = COMMANDS[sys.argv[0]].partition(":")
        try:
            getattr(importlib.import_module(module), function)()
        finally:  # without the end of the interpreter, which takes 0.3 s for torch's modules
            sys.stdout.flush()
            os._exit(0)
