"""A Flower app whose client i trains by adding i + 1 to every element; client 1 is killed while it trains."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import ArrayRecord, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from accelerant.privacy import mpc
from accelerant.privacy.federated import flower
from accelerant.runtime.files import write_atomic


def read(path):
    parties = json.loads(Path(path).read_text())
    setup = mpc.SecureAggregation(**parties["setup"])
    return parties, setup, [bytes.fromhex(key) for key in parties["verification"]]


def make_client(context):
    parties, setup, keys = read(context.run_config["parties"])
    i = int(context.node_config["partition-id"])
    signing = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(parties["signing"][i]))
    return setup.client(i, signing, keys, state_path=Path(parties["folder"]) / f"client{i}")


client_app = ClientApp(mods=[flower.secure_aggregation_mod(make_client)])
server_app = ServerApp()


@client_app.train()
def train(message, context):
    i = int(context.node_config["partition-id"])
    if i == 1:
        parties, *_ = read(context.run_config["parties"])
        os.kill(int((Path(parties["folder"]) / "supernode1").read_text()), signal.SIGKILL)
        sys.exit(1)
    arrays = message.content["arrays"].to_numpy_ndarrays()
    trained = ArrayRecord(numpy_ndarrays=[each + i + 1 for each in arrays])
    return Message(RecordDict({"arrays": trained}), reply_to=message)


@server_app.main()
def main(grid, context):
    parties, setup, keys = read(context.run_config["parties"])
    while len(list(grid.get_node_ids())) < setup.clients:
        time.sleep(0.2)
    arrays = ArrayRecord(numpy_ndarrays=[np.zeros((2, 3)), np.full(2, 10.0)])
    arrays, report = flower.secure_round(grid, setup.server(1, keys), 1, arrays, timeout=parties["timeout_s"])
    result = {
        "survivors": report.survivors,
        "arrays": [each.tolist() for each in arrays.to_numpy_ndarrays()],
        "bytes": {name: stage.bytes_up for name, stage in report.stages.items()},
    }
    write_atomic(Path(parties["folder"]) / "result.json", json.dumps(result).encode())
