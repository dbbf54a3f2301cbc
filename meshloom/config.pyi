from trainer.config import *
