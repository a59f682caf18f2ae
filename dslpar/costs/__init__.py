"""Costs of a model's layers in closed form: what they hold, send and compute on a rank. No torch."""
