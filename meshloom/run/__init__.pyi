from trainer.run import *
