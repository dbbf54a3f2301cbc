from trainer.tasks import *
