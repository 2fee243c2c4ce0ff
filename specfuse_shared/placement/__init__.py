"""Devices, sizes, and the plan that assigns members to devices."""
