"""Forecast a layout before anything runs: memory and step time in closed form, and a search for better layouts.

Input: a model's costs (`dslpar.costs`), a mesh and a machine. Output: bytes per rank, seconds per step, and layouts in
order of their time. It is plain arithmetic; tests compare it with what real ranks hold and send.
"""
