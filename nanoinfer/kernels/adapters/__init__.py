"""Low-rank adapters beside a weight (LoRA, Hu et al., 2021), of which each row of a step names one or none."""
