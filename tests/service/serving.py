"""A server process of `accelerant serve`, for tests."""

import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time

import httpx


class Server:
    """The command `accelerant serve` on a free port, with its log."""

    def __init__(self, directory, *arguments, env=None, wait_s=120):
        command = [sys.executable, "-m", "accelerant", "serve", "--port", "0", "--directory", str(directory)]
        self.process = subprocess.Popen(
            [*command, *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        )
        self.lines, found = [], queue.Queue()

        def read():
            for line in self.process.stderr:
                self.lines.append(line.rstrip("\n"))
                if match := re.search(r"listening on (https?://[^\"\s]+)", line):
                    found.put(match[1])
            found.put(None)

        self.reader = threading.Thread(target=read, daemon=True)
        self.reader.start()
        self.url = found.get(timeout=wait_s)
        if self.url is None:
            self.process.wait()
            raise RuntimeError("\n".join(self.lines))

    def client(self, **options):
        return httpx.Client(base_url=self.url, timeout=120, trust_env=False, **options)

    def records(self):
        """The lines of the log that are about requests."""
        entries = [json.loads(line) for line in self.lines]
        return [entry for entry in entries if "request_id" in entry]

    def record(self, request_id, wait_s=120):
        """The line of a request, which the server writes soon after its answer."""
        end = time.monotonic() + wait_s
        while not (found := [record for record in self.records() if record["request_id"] == request_id]):
            assert time.monotonic() < end
            time.sleep(0.02)
        return found[0]

    def stop(self):
        """Send SIGTERM; return the exit status."""
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(timeout=120)
        self.process.stderr.close()
        return status
