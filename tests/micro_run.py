"""A run of a model so small that a step of it takes no time."""

from accelerant.nn.train.config import preset

MICRO = preset("tiny").replaced(
    name="micro", context=16, layers=1, heads=2, width=16, batch_size=4, microbatch=2, steps=12, learning_rate=1e-2,
    validations=2, validation_tokens=256, sample_tokens=8, checkpoint_every_s=300.0, cpu_threads=None,
    predict_memory=False,
)  # fmt: skip
