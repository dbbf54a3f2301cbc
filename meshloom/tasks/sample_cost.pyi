from trainer.tasks.sample_cost import *
