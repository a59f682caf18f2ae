"""Costs of a model's layers on a rank in closed form: memory, traffic and compute. No torch."""
