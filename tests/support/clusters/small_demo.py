"""The trained demo in small: seconds instead of minutes."""

from __future__ import annotations

from cluster.local.trained_demo.adapters import DemoAdapter
from cluster.local.trained_demo.make import Recipe
from cluster.local.trained_demo.pretraining import Pretraining
from samples.styles import SENTENCES, Questions

SMALL_DEMO = Recipe(
    pretraining=Pretraining(
        hidden=64, num_heads=4, num_kv_heads=2, num_steps=600, batch_size=16, learning_rate=6e-3, num_warmup=20
    ),
    adapters=(
        DemoAdapter("shout", "shout", "lora", 5e-3, num_steps=50),
        DemoAdapter("list-direft", "list", "direft", 3e-2, num_steps=50),
    ),
    questions=Questions(SENTENCES[:6], max_topics=3),
    styles=("shout", "list"),
)
