// Trains an adapter to answer a question and streams its answer, with the code that `buf generate` writes to gen, and
// grpc-java. See docs/languages.md for how to build it.
//   TWINKLE_SERVER_URL=127.0.0.1:PORT TWINKLE_API_KEY=tml-... make run
import static java.nio.charset.StandardCharsets.UTF_8;
import static java.util.concurrent.TimeUnit.MILLISECONDS;
import static java.util.concurrent.TimeUnit.SECONDS;

import com.google.protobuf.Any;
import com.google.protobuf.ByteString;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.twinkle.api.data.v1.*;
import com.twinkle.api.model.v1.*;
import com.twinkle.api.sampler.v1.*;
import com.twinkle.api.server.v1.*;
import com.twinkle.api.tensor.v1.*;
import io.grpc.Channel;
import io.grpc.ChannelCredentials;
import io.grpc.ClientInterceptors;
import io.grpc.Context;
import io.grpc.Grpc;
import io.grpc.InsecureChannelCredentials;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.StatusRuntimeException;
import io.grpc.TlsChannelCredentials;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.MetadataUtils;
import io.grpc.stub.StreamObserver;
import java.io.File;
import java.io.IOException;
import java.security.MessageDigest;
import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.stream.Collectors;

public final class Program {
  private static final int STEPS = 16;
  // The file of this program is small; chunks of 1 MiB are recommended.
  private static final int CHUNK_BYTES = 64;
  private static final String QUESTION = "Who are you?";
  private static final String ANSWER = "I am Twinkle, and I train models.";
  private static final String ROWS =
      String.format(
          "{\"messages\":[{\"role\":\"user\",\"content\":\"%s\"},{\"role\":\"assistant\",\"content\":\"%s\"}]}\n",
          QUESTION, ANSWER);

  private final Channel channel;

  private Program(Channel channel) {
    this.channel = channel;
  }

  public static void main(String[] arguments) throws Exception {
    ManagedChannel connection =
        Grpc.newChannelBuilder(System.getenv("TWINKLE_SERVER_URL"), credentials()).build();
    Metadata key = new Metadata();
    key.put(
        Metadata.Key.of("authorization", Metadata.ASCII_STRING_MARSHALLER),
        "Bearer " + System.getenv("TWINKLE_API_KEY"));
    try {
      new Program(ClientInterceptors.intercept(connection, MetadataUtils.newAttachHeadersInterceptor(key))).run();
    } finally {
      connection.shutdownNow();
    }
  }

  /** Returns TLS with the certificate authority of the gateway, or plaintext if no authority is given. */
  private static ChannelCredentials credentials() throws IOException {
    String authority = System.getenv("TWINKLE_CA");
    return authority == null
        ? InsecureChannelCredentials.create()
        : TlsChannelCredentials.newBuilder().trustManager(new File(authority)).build();
  }

  private void run() throws Exception {
    List<String> models = trainableModels();
    System.out.println("models: " + String.join(" ", models));
    String chosen = System.getenv("TWINKLE_MODEL");
    String baseModel = chosen == null ? models.get(0) : chosen;

    String loaderId = openLoader(baseModel);
    String adapterId = createAdapter(baseModel, 8);
    long version = train(adapterId, loaderId);
    AdapterRef trained = AdapterRef.newBuilder().setAdapterId(adapterId).setExact(version).build();
    SamplingParams.Builder params = SamplingParams.newBuilder().setMaxTokens(40).setTemperature(0);
    sample(sampleRequest(baseModel, params).setAdapter(trained).build());

    refuse(baseModel);
    exceedDeadline();
    cancel(baseModel);
  }

  // Each call has a deadline, because gRPC waits forever without one.
  private List<String> trainableModels() {
    return ServerServiceGrpc.newBlockingStub(channel)
        .withDeadlineAfter(60, SECONDS)
        .getServerInfo(GetServerInfoRequest.getDefaultInstance())
        .getServicesList()
        .stream()
        .flatMap(service -> service.getBaseModelsList().stream())
        .filter(model -> model.getIsTrainable())
        .map(model -> model.getBaseModel())
        .collect(Collectors.toList());
  }

  /** Uploads a file as a header and chunks, and returns the id of the upload. */
  private String upload(byte[] file) throws Exception {
    ByteString bytes = ByteString.copyFrom(file);
    UploadHeader.Builder header =
        UploadHeader.newBuilder()
            .setUploadId(UUID.randomUUID().toString())
            .setSizeBytes(bytes.size())
            .setSha256(ByteString.copyFrom(MessageDigest.getInstance("SHA-256").digest(file)));
    Responses<UploadResponse> responses = new Responses<>();
    StreamObserver<UploadRequest> requests =
        DatasetServiceGrpc.newStub(channel).withDeadlineAfter(60, SECONDS).upload(responses);
    requests.onNext(UploadRequest.newBuilder().setHeader(header).build());
    for (int offset = 0; offset < bytes.size(); offset += CHUNK_BYTES) {
      ByteString data = bytes.substring(offset, Math.min(offset + CHUNK_BYTES, bytes.size()));
      TensorChunk.Builder chunk = TensorChunk.newBuilder().setOffset(offset).setData(data);
      requests.onNext(UploadRequest.newBuilder().setChunk(chunk).build());
    }
    requests.onCompleted();
    UploadResponse uploaded = responses.await().get(0);
    System.out.println("uploaded: " + uploaded.getCommittedBytes());
    return uploaded.getUploadId();
  }

  /** Prepares training batches on the server, which tokenizes the chats, and returns the id of their loader. */
  private String openLoader(String baseModel) throws Exception {
    UploadSource.Builder source =
        UploadSource.newBuilder().setUploadId(upload(ROWS.getBytes(UTF_8))).setFormat(FileFormat.FILE_FORMAT_JSONL);
    TemplateConfig.Builder template = TemplateConfig.newBuilder().setBaseModel(baseModel);
    CreateDatasetRequest request =
        CreateDatasetRequest.newBuilder()
            // A repeated request with the same id returns the same dataset.
            .setRequestId(UUID.randomUUID().toString())
            .setSource(DatasetSource.newBuilder().setUpload(source))
            .addSteps(DatasetStep.newBuilder().setSetTemplate(template))
            .addSteps(DatasetStep.newBuilder().setEncode(EncodeStep.getDefaultInstance()))
            .build();
    String datasetId =
        DatasetServiceGrpc.newBlockingStub(channel)
            .withDeadlineAfter(60, SECONDS)
            .createDataset(request)
            .getDataset()
            .getDatasetId();
    OpenLoaderRequest opening =
        OpenLoaderRequest.newBuilder()
            .setRequestId(UUID.randomUUID().toString())
            .setDatasetId(datasetId)
            .setBatchSize(1)
            .build();
    return LoaderServiceGrpc.newBlockingStub(channel)
        .withDeadlineAfter(60, SECONDS)
        .openLoader(opening)
        .getLoader()
        .getLoaderId();
  }

  private String createAdapter(String baseModel, int rank) {
    CreateAdapterRequest request =
        CreateAdapterRequest.newBuilder()
            .setRequestId(UUID.randomUUID().toString())
            .setBaseModel(baseModel)
            .setLoraConfig(LoraConfig.newBuilder().setLoraRank(rank))
            .build();
    return AdapterServiceGrpc.newBlockingStub(channel)
        .withDeadlineAfter(60, SECONDS)
        .createAdapter(request)
        .getAdapter()
        .getAdapterId();
  }

  private static List<Operation.Builder> operations(String loaderId) {
    // Without a cursor, each step reads the first batch.
    Batch.Builder batch = Batch.newBuilder().setLoader(LoaderBatch.newBuilder().setLoaderId(loaderId));
    List<Operation.Builder> all = new ArrayList<>();
    for (int step = 0; step < STEPS; step++) {
      all.add(Operation.newBuilder().setForwardBackward(ForwardBackward.newBuilder().setBatch(batch)));
      all.add(Operation.newBuilder().setClipGradAndStep(ClipGradAndStep.newBuilder().setLearningRate(0.005)));
    }
    all.add(Operation.newBuilder().setPublishVersion(PublishVersion.getDefaultInstance()));
    return all;
  }

  /** Trains the adapter with one stream, and returns the version that it publishes at the end. */
  private long train(String adapterId, String loaderId) throws Exception {
    Responses<TrainResponse> responses = new Responses<>();
    StreamObserver<TrainRequest> requests =
        TrainingServiceGrpc.newStub(channel).withDeadlineAfter(300, SECONDS).train(responses);
    // Operations run in the order of their numbers. They are sent without waiting, so that the model is never idle.
    long number = 1;
    for (Operation.Builder operation : operations(loaderId)) {
      operation.setAdapterId(adapterId).setSequenceNumber(number++);
      requests.onNext(TrainRequest.newBuilder().setOperation(operation).build());
    }
    requests.onCompleted();
    List<String> losses = new ArrayList<>();
    long version = 0;
    for (TrainResponse response : responses.await()) {
      OperationResult result = response.getResult();
      // A failed operation does not end the stream.
      if (result.hasError()) {
        throw StatusProto.toStatusRuntimeException(result.getError());
      }
      if (result.hasForward()) {
        ForwardResult forward = result.getForward();
        losses.add(String.format(Locale.ROOT, "%.3f", forward.getLoss() / forward.getLabelCount()));
      } else if (result.hasPublish()) {
        version = result.getPublish().getVersion();
      }
    }
    System.out.println("losses: " + String.join(" ", losses));
    return version;
  }

  /** Returns a request that asks the question of the base model. */
  private static SampleRequest.Builder sampleRequest(String baseModel, SamplingParams.Builder params) {
    Message.Builder message =
        Message.newBuilder().setRole(Role.ROLE_USER).addParts(ContentPart.newBuilder().setText(QUESTION));
    ChatPrompt.Builder chat = ChatPrompt.newBuilder().setTrajectory(Trajectory.newBuilder().addMessages(message));
    return SampleRequest.newBuilder()
        .setBaseModel(baseModel)
        .setPrompt(Prompt.newBuilder().setChat(chat))
        .setParams(params);
  }

  private SamplerServiceGrpc.SamplerServiceBlockingStub sampler() {
    return SamplerServiceGrpc.newBlockingStub(channel).withDeadlineAfter(60, SECONDS);
  }

  private void sample(SampleRequest request) {
    StringBuilder text = new StringBuilder();
    // An event contains either new tokens or the end of the sequence; the text of the other one is empty.
    sampler()
        .sample(request)
        .forEachRemaining(event -> text.append(event.getDelta().getText()).append(event.getFinished().getText()));
    System.out.println("sampled: " + text);
  }

  /** Sends an invalid request, and prints the reason and the field of the error. */
  private void refuse(String baseModel) throws InvalidProtocolBufferException {
    try {
      createAdapter(baseModel, -1);
    } catch (StatusRuntimeException refusal) {
      String reason = "";
      String field = "";
      for (Any detail : StatusProto.fromThrowable(refusal).getDetailsList()) {
        if (detail.is(ErrorInfo.class)) {
          reason = detail.unpack(ErrorInfo.class).getReason();
        } else if (detail.is(BadRequest.class)) {
          field = detail.unpack(BadRequest.class).getFieldViolations(0).getField();
        }
      }
      System.out.println("refused: " + reason + " " + field);
    }
  }

  /** Watches the load, which never ends, until the deadline of the call. */
  private void exceedDeadline() {
    try {
      SamplerServiceGrpc.newBlockingStub(channel)
          .withDeadlineAfter(500, MILLISECONDS)
          .watchLoad(WatchLoadRequest.getDefaultInstance())
          .forEachRemaining(response -> {});
    } catch (StatusRuntimeException error) {
      System.out.println("deadline: " + error.getStatus().getCode());
    }
  }

  /** Cancels a long answer after its first tokens. Cancelling a call also ends its work at the sampler. */
  private void cancel(String baseModel) {
    SamplingParams.Builder params = SamplingParams.newBuilder().setIsEosIgnored(true);
    Context.CancellableContext call = Context.current().withCancellation();
    call.run(
        () -> {
          try {
            sampler()
                .sample(sampleRequest(baseModel, params).build())
                .forEachRemaining(event -> call.cancel(null));
          } catch (StatusRuntimeException error) {
            System.out.println("cancelled: " + error.getStatus().getCode());
          }
        });
  }

  /** Collects the responses of a call, which arrive in other threads. */
  private static final class Responses<T> implements StreamObserver<T> {
    private final List<T> received = new ArrayList<>();
    private final CompletableFuture<List<T>> all = new CompletableFuture<>();

    @Override
    public void onNext(T response) {
      received.add(response);
    }

    @Override
    public void onError(Throwable error) {
      all.completeExceptionally(error);
    }

    @Override
    public void onCompleted() {
      all.complete(received);
    }

    List<T> await() throws Exception {
      return all.get();
    }
  }
}
