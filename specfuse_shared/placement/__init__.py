"""What fits where: devices, sizes, and the plan that puts members onto them."""
