"""The demo's adapters for SmolLM2-135M-Instruct, and the rows that they were trained on (train.sh).

`pirate` and `brief` say what the base model says in another way: as a pirate would, and in one sentence. `json` turns
orders into JSON; `support` answers for a shop of bicycles. All rows were made by scripts, orders from lists of words.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
ADAPTERS = ("pirate", "json", "support", "brief")
FOR_ALL_POSITIONS = "pirate-all"
