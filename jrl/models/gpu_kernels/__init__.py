"""Kernels for NVIDIA GPUs, in Pallas' Triton dialect; ``models/gpu.py`` calls them.

A token step on a GPU moves few bytes in each of some hundred kernels, so that what counts beside
the bytes is how many kernels there are. In training bytes count alone; ``rotation`` is for that.
"""

from jrl.models.gpu_kernels.attention import Reach as Reach
from jrl.models.gpu_kernels.attention import Rotation as Rotation
from jrl.models.gpu_kernels.attention import attend_cache as attend_cache
from jrl.models.gpu_kernels.attention_program import COLUMNS as COLUMNS
from jrl.models.gpu_kernels.attention_program import Scores as Scores
from jrl.models.gpu_kernels.draw import BLOCKS as BLOCKS
from jrl.models.gpu_kernels.draw import block_sums as block_sums
from jrl.models.gpu_kernels.draw import pick as pick
from jrl.models.gpu_kernels.products import PAIRED as PAIRED
from jrl.models.gpu_kernels.products import Weight as Weight
from jrl.models.gpu_kernels.products import added_norm as added_norm
from jrl.models.gpu_kernels.products import few_rows as few_rows
from jrl.models.gpu_kernels.products import gated as gated
from jrl.models.gpu_kernels.products import takes_product as takes_product
from jrl.models.gpu_kernels.rotation import Norm as Norm
from jrl.models.gpu_kernels.rotation import norm_rotated as norm_rotated
from jrl.models.gpu_kernels.truncation import least_kept as least_kept
