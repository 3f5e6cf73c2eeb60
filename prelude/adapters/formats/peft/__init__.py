"""PEFT's LoRA directories."""
