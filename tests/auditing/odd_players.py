"""Right loops that look odd: adversaries, and agents that are rewarded.

Each means what it computes.
"""

import itertools
import math

import audited
import torch
from audited import N, adam, clipping, copy_of, network, of_tokens, rows, slopes, stepping, train
from cases import right
from torch import Tensor, nn
from torch.distributions import Categorical, Normal
from torch.nn import functional as F
from torch.optim import lr_scheduler


def least_squares(scores: Tensor, label: float) -> Tensor:
    return F.mse_loss(scores, torch.full_like(scores, label))


# --- adversaries ----------------------------------------------------------------------------------


@right()
def wgan_with_gradient_penalty(watch):
    """Five steps of the critic for one of the generator; each clears its own gradients before its
    pass, so what the generator's pass leaves in the critic is never used."""
    generator, critic = network(8, 16), network(16, 1)
    of_generator, of_critic = adam(generator, betas=(0.0, 0.9)), adam(critic, betas=(0.0, 0.9))
    with watch(nn.ModuleList([generator, critic]), of_critic, windows=10):
        for i, (x, _) in enumerate(rows(12)):
            fake = generator(torch.randn(len(x), 8)).detach()
            mixed = torch.lerp(x, fake, torch.rand(len(x), 1)).requires_grad_()
            penalty = (slopes(critic(mixed), mixed).norm(dim=1) - 1).square().mean()
            of_critic.zero_grad()
            (critic(fake).mean() - critic(x).mean() + 10 * penalty).backward()
            of_critic.step()
            if (i + 1) % 5 == 0:
                of_generator.zero_grad()
                (-critic(generator(torch.randn(len(x), 8))).mean()).backward()
                of_generator.step()


@right()
def path_lengths_lazily(watch):
    """StyleGAN2: every fourth time the generator has a second step, of path lengths alone, whose
    weight is four times as large because it comes every fourth time."""
    generator = nn.ModuleDict({"mapping": network(8, 8), "synthesis": network(8, 16)})
    judge, every, average = network(16, 1), 4, torch.zeros(())
    of_generator, of_judge = adam(generator, betas=(0.0, 0.99**0.8)), adam(judge, betas=(0.0, 0.99))

    def images():
        styles = generator["mapping"](torch.randn(8, 8))
        return styles, generator["synthesis"](styles)

    with watch(nn.ModuleList([generator, judge]), of_generator, windows=10):
        for i, (x, _) in enumerate(rows(12)):
            of_judge.zero_grad()
            fake = images()[1].detach()
            (F.softplus(judge(fake)).mean() + F.softplus(-judge(x)).mean()).backward()
            of_judge.step()
            of_generator.zero_grad()
            F.softplus(-judge(images()[1])).mean().backward()
            of_generator.step()
            if i % every == 0:
                styles, image = images()
                lengths = slopes(image * torch.randn_like(image) / 4, styles).norm(dim=1)
                average = torch.lerp(average, lengths.mean().detach(), 0.01)
                of_generator.zero_grad()
                (2 * every * (lengths - average).square().mean()).backward()
                of_generator.step()


@right()
def cycles_of_two_generators(watch):
    """CycleGAN: two generators in one optimizer, discriminators frozen while these learn, and a
    schedule for each optimizer that steps once an epoch."""
    generators = nn.ModuleList([network(16, 16), network(16, 16)])
    judges = nn.ModuleList([network(16, 1), network(16, 1)])
    of_generators = torch.optim.Adam(
        itertools.chain(generators[0].parameters(), generators[1].parameters()), lr=2e-4
    )
    of_judges = adam(judges, betas=(0.5, 0.999))
    schedules = [
        lr_scheduler.LambdaLR(o, lambda epoch: 1 - epoch / 3) for o in (of_generators, of_judges)
    ]
    with watch(nn.ModuleList([generators, judges]), of_generators):
        for _ in range(2):
            for (a, _), (b, _) in zip(rows(8)[:4], rows(8)[4:]):
                to_b, to_a = generators
                fake_b, fake_a = to_b(a), to_a(b)
                judges.requires_grad_(False)
                of_generators.zero_grad()
                loss = least_squares(judges[0](fake_a), 1) + least_squares(judges[1](fake_b), 1)
                loss = loss + 10 * (F.l1_loss(to_a(fake_b), a) + F.l1_loss(to_b(fake_a), b))
                (loss + 5 * (F.l1_loss(to_a(a), a) + F.l1_loss(to_b(b), b))).backward()
                of_generators.step()
                judges.requires_grad_(True)
                of_judges.zero_grad()
                for judge, real, fake in zip(judges, (a, b), (fake_a, fake_b)):
                    scores = judge(real), judge(fake.detach())
                    (0.5 * (least_squares(scores[0], 1) + least_squares(scores[1], 0))).backward()
                of_judges.step()
            for schedule in schedules:
                schedule.step()


class Reversed(torch.autograd.Function):
    """The input, and its gradient times a negative factor."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.factor * grad, None


@right()
def reversed_gradients(watch):
    """Domains are told apart behind a layer that reverses gradients, by a factor that grows with
    the training; labels and domains are two losses of one pass."""
    model = nn.ModuleDict({"f": network(16, 8), "labels": network(8, 8), "domains": network(8, 2)})
    optimizer, batches = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), rows(4 * N)
    passes = itertools.count()

    def loss_of(model, source, y):
        factor = 2 / (1 + math.exp(-10 * next(passes) / len(batches))) - 1
        features = model["f"](torch.cat([source, source.flip(1) + 1]))
        domains = torch.arange(2).repeat_interleave(len(source))
        loss = F.cross_entropy(model["labels"](features[: len(y)]), y)
        told = model["domains"](Reversed.apply(features, factor))
        return loss + F.cross_entropy(told, domains)

    return train(watch, model, optimizer, batches, loss_of)


@right()
def perturbed_embeddings(watch):
    """FGM: a second pass is made where the embedding is moved along its gradient, and both passes
    count; the embedding is put back before the step."""
    model = audited.LanguageModel()
    table = model.embedding.weight
    for tokens, targets in stepping(watch, model, adam(model), audited.pairs(6)):
        of_tokens(model(tokens)[0], targets).backward()
        kept = table.data.clone()
        table.data.add_(table.grad / table.grad.norm())
        of_tokens(model(tokens)[0], targets).backward()
        table.data.copy_(kept)


# --- reinforcement --------------------------------------------------------------------------------


@right("accumulation.dropped")
def ppo_until_the_policy_has_moved(watch):
    """Epochs over a rollout, in minibatches of two micro-batches. As soon as the divergence is too
    large the author drops the open window and the rest of the epochs."""
    model = network(16, 9)  # eight logits and a value
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-5)

    def learn(states, actions, old, returns, advantages):
        for _ in range(3):
            for rows_of in torch.randperm(64).split(32):
                gain = advantages[rows_of]
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                for part, gained in zip(rows_of.split(16), gain.split(16)):
                    *logits, value = model(states[part]).split([8, 1], 1)
                    policy = Categorical(logits=logits[0])
                    ratio = (policy.log_prob(actions[part]) - old[part]).exp()
                    if (ratio - 1 - ratio.log()).mean() > 0.002:
                        optimizer.zero_grad()
                        return
                    surrogate = torch.min(ratio * gained, ratio.clamp(0.8, 1.2) * gained).mean()
                    loss = 0.5 * F.mse_loss(value[:, 0], returns[part]) - surrogate
                    ((loss - 0.01 * policy.entropy().mean()) / 2).backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()

    with watch(model, optimizer, windows=6):
        for update in range(4):
            optimizer.param_groups[0]["lr"] = 3e-3 * (1 - update / 4)
            states = torch.randn(64, 16)
            with torch.no_grad():
                out = model(states)
                policy = Categorical(logits=out[:, :8])
                actions = policy.sample()
            returns = (actions == states[:, :8].argmax(1)).float()
            learn(states, actions, policy.log_prob(actions), returns, returns - out[:, 8])


@right()
def a2c_summed_over_time(watch):
    """Returns from the end of a rollout; losses are summed over time, as in A3C, and averaged over
    the environments, which have a pass each."""
    model = network(16, 9)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=7e-4, alpha=0.99)
    environments, clip = [*range(N)] * 5, clipping(model, 0.5)
    for environment in stepping(watch, model, optimizer, environments, every=N, before=clip):
        out = model(torch.randn(5 + environment, 16))
        policy, values = Categorical(logits=out[:-1, :8]), out[:-1, 8]
        actions = policy.sample()
        returns, running = [], out[-1, 8].item()
        for action in reversed(actions.tolist()):
            running = float(action == 0) + 0.99 * running
            returns.insert(0, running)
        advantages = torch.tensor(returns) - values
        loss = -(policy.log_prob(actions) * advantages.detach()).sum()
        loss = loss + 0.5 * advantages.square().sum() - 0.01 * policy.entropy().sum()
        (loss / N).backward()


def drawn(actor: nn.Module, states: Tensor) -> tuple[Tensor, Tensor]:
    """Actions of a policy with a normal distribution, and their logarithmic probabilities."""
    mean, deviation = actor(states).chunk(2, 1)
    policy = Normal(mean, F.softplus(deviation) + 0.01)
    actions = policy.rsample()
    return actions, policy.log_prob(actions).sum(1, keepdim=True)


@right()
def sac(watch):
    """Twin critics with a target, an actor whose pass runs through the critics, and a temperature:
    three optimizers, three passes; only the critics' is given."""
    actor, critics = network(16, 4), nn.ModuleList([network(18, 1), network(18, 1)])
    nn.init.normal_(critics[1][0].weight, std=0.1)
    targets, temperature = copy_of(critics), nn.Parameter(torch.zeros(()))
    of_actor, of_critics = adam(actor), adam(critics)
    of_temperature = torch.optim.Adam([temperature], lr=1e-2)

    def worth(of, states, actions):
        return torch.min(*[critic(torch.cat([states, actions], 1)) for critic in of])

    with watch(nn.ModuleList([actor, critics]), of_critics):
        for x, y in rows(8):
            actions, later = torch.randn(len(x), 2), x.roll(1, 0)
            with torch.no_grad():
                next_actions, likely = drawn(actor, later)
                value = worth(targets, later, next_actions) - temperature.exp() * likely
                target = y[:, None].float() + 0.99 * value
            of_critics.zero_grad()
            both = [F.mse_loss(critic(torch.cat([x, actions], 1)), target) for critic in critics]
            sum(both).backward()
            of_critics.step()
            actions, likely = drawn(actor, x)
            of_actor.zero_grad()
            loss = (temperature.exp().detach() * likely - worth(critics, x, actions)).mean()
            loss.backward()
            of_actor.step()
            of_temperature.zero_grad()
            (-temperature * (likely.detach() - 2).mean()).backward()
            of_temperature.step()
            audited.follow(targets, critics, 0.005)


@right()
def dqn(watch):
    """A replay buffer, double Q, a target that is copied every third step, gradients clipped by
    value; the first passes through the buffer train nothing because it is too small."""
    model = network()
    target, optimizer, buffer = copy_of(model), adam(model), []
    with watch(model, optimizer):
        for i, (x, y) in enumerate(rows(12)):
            buffer.append((x, y, torch.rand(len(x)), x.roll(1, 0)))
            if len(buffer) < 4:
                continue
            picked = torch.randint(len(buffer), (4,)).tolist()
            states, actions, rewards, later = map(torch.cat, zip(*[buffer[j] for j in picked]))
            with torch.no_grad():
                best = model(later).argmax(1, keepdim=True)
                wanted = rewards + 0.99 * target(later).gather(1, best)[:, 0]
            loss = F.smooth_l1_loss(model(states).gather(1, actions[:, None])[:, 0], wanted)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_value_(model.parameters(), 100)
            optimizer.step()
            if i % 3 == 0:
                target.load_state_dict(model.state_dict())


ANSWERS = audited.tagged(5 * N, labels=(12, 8, 7, 9))


def of_a_group(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The losses [2, 6] of the tokens of two answers with opposite advantages, and their mask."""
    mask = y != audited.IGNORED
    likely = model(x).log_softmax(-1).gather(-1, y.clamp(min=0)[..., None])[..., 0]
    advantages = torch.tensor([[1.0], [-1.0]])
    return -(likely - likely.detach()).exp() * advantages * mask, mask


@right()
def constant_normaliser_of_tokens(watch, model, optimizer):
    """Dr. GRPO: sums over tokens, divided by the largest length there can be and not by the number
    of tokens there are, so that long answers are not favoured."""
    clip = clipping(model, 1.0)
    for x, y in stepping(watch, model, optimizer, ANSWERS, every=N, before=clip):
        losses, _ = of_a_group(model, x, y)
        (losses.sum() / (N * losses.numel())).backward()


@right()
def means_of_sequences(watch, model, optimizer):
    """GRPO as published: each answer counts the same, whatever its length, so that the mean over
    its tokens comes first; every micro-batch has two answers."""
    for x, y in stepping(watch, model, optimizer, ANSWERS, every=N):
        losses, mask = of_a_group(model, x, y)
        ((losses.sum(1) / mask.sum(1)).mean() / N).backward()
