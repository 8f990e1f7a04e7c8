# SPDX-License-Identifier: Apache-2.0
"""Helpers that the tests share."""
