"""What runs when: schedules as values, generators, lowering, proof, simulation, drawing. No torch, no MPI, no GPU."""
