"""Memory and time of a run on a TPU slice, from its programs compiled without a TPU.

- ``topology``: chips, slices, and devices to compile for
- ``lower``: a run without data or weights, and its two programs traced for a mesh
- ``hlo``, ``costs``: operations, bytes and collectives of a compiled program
- ``memory``: bytes on a chip, and what would make a program fit
- ``compile``: the plan of a run
- ``disjoint``: plans with devices of their own for rollout and training
- ``search``: candidates for mesh, remat, microbatches and placement, ranked
- ``text``: a plan as text and JSON
"""
