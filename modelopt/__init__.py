# SPDX-License-Identifier: Apache-2.0
"""Model optimisation."""
