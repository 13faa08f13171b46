"""Room of the roofline model, the rack simulator and capacity planning. Empty until its issue is taken."""
