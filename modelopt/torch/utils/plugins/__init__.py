# SPDX-License-Identifier: Apache-2.0
"""Utilities for models of other libraries."""
