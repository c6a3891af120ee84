"""Steps on a device that runs on its own time: one kernel over KV blocks, graphs, steps ahead.

accelerator.py  what such a device offers: memory it reads by itself, marks, graphs
staging.py      a step's numbers, on their way to it in one copy
kernel.py       attention over blocks by somebody's kernel, proven at load
attention.py    attention of one step through that kernel
step_arrays.py  a schedule as arrays
graphs.py       decode steps captured once and replayed
sampling.py     tokens drawn without asking the device anything
stepper.py      the step itself, launched now and read later
"""
