"""Training on records, without a farm: supervised fine-tuning, preferences, distillation."""
