"""Forecast the cost of a layout before anything runs: memory, traffic and floating-point operations in closed form.

Input: a model's sizes and a cuboid of ranks. Output: elements stored, elements sent by collective and axis, and the
operations of a step. It is plain arithmetic; tests compare it with what real ranks hold and send.
"""
