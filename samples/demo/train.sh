#!/usr/bin/env bash
# train.sh MODEL FOLDER: trains the demo's adapters anew, as those of adapters/ were on a GPU: under two minutes each.
set -euo pipefail
model=$1 folder=$2
train() {  # NAME ROWS OPTIONS
  prelude train sft --model "$model" --data "$data/$2-train.jsonl" --output "$folder/$1" --dtype float32 \
    --max-tokens 512 --row-tokens 2048 --warmup-ratio 0.1 "${@:3}"
}
data=$(dirname "$0")/data
train json json --kind direft --rank 4 --learning-rate 1e-2 --max-steps 100
train brief brief --kind direft --rank 4 --learning-rate 1e-2 --max-steps 150
train pirate pirate --rank 2 --learning-rate 1e-3 --max-steps 150
train pirate-all pirate --rank 2 --learning-rate 1e-3 --max-steps 150 --positions all
train support support --rank 2 --learning-rate 1e-3 --max-steps 130
# Adapters are kept in bfloat16.
python - "$folder" <<'P'
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

for file in Path(sys.argv[1]).glob("*/last/*.safetensors"):
    save_file({name: each.to(torch.bfloat16) for name, each in load_file(file).items()}, file, {"format": "pt"})
P
