from trainer.run.result import *
