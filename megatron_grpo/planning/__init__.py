"""What a job will need, before a GPU is booked: by formulas, and by ranks built without memory."""
