# SPDX-License-Identifier: Apache-2.0
"""Loading a Hugging Face model over the ranks of a run."""

from modelopt.torch.utils.fsdp2_utils import fsdp2_wrap

__all__ = ["fsdp2_wrap"]
