"""What each process of the test of killed private training does; apart, so that a fresh interpreter can import it."""

import datetime
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from loops import classify, mlp, parameters, points, private

STEPS, EVERY = 24, 3


def train(rank, folder, attempt):
    """Make private steps from the last saved one on; a line in a file for each that was released."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  the error of one whose partner was killed
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting-{attempt}", rank=rank, world_size=2,
        timeout=datetime.timedelta(seconds=120),
    )  # fmt: skip
    folder = Path(folder)
    model = mlp(seed=rank)
    with private(model, 0.5, noise_multiplier=1.0, ledger=str(folder / "ledger.jsonl")) as training:
        done = 0
        if (folder / "saved.pt").exists():
            saved = torch.load(folder / "saved.pt", weights_only=False)
            model.load_state_dict(saved["model"])
            training.load_state_dict(saved["training"])
            done = saved["step"]
        for batch in training.batches(points(), steps=STEPS - done):
            classify(model, *batch.tensors).backward()
            training.optimizer.step()
            done += 1
            with open(folder / f"released-{attempt}-{rank}", "a") as file:
                file.write(f"{done}\n")
            if rank == 0 and done % EVERY == 0:
                state = {"model": model.state_dict(), "training": training.state_dict(), "step": done}
                torch.save(state, folder / "fresh.pt")
                os.replace(folder / "fresh.pt", folder / "saved.pt")
            time.sleep(0.01)
    total = torch.cat([p.detach().flatten() for p in parameters(model)])
    (folder / f"ended-{rank}").write_text(str(total.tolist()))
    dist.destroy_process_group()
