# SPDX-License-Identifier: Apache-2.0
"""Utilities for quantization and export code."""
