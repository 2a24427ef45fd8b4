"""Adapters (LoRA, Hu et al., 2021): read as PEFT writes them, checked, and written into the slots of this rank."""
