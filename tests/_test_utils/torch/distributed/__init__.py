# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests on real ranks."""
