"""What a config's values are, and why: the reference of all keys, each value and its reason, how two configs differ.

From the ground up: reference (every key, from the spec's own source), tables (the same as a page), case (a config under
question), places (where a value came from), inferred (what follows from what), values (each value with its reason),
deepspeed (which key each of DeepSpeed's came from), asked (a key as a person writes it), differences (two configs),
words (all of that as text). That a listing tells of each value where it was said is git's `config --show-origin`; that
what was overridden is named too, jj's `config list`.
"""
